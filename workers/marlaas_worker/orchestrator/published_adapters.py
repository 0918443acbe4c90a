"""Sends parts of adapter files to the exporters that upload them, which cannot read the blob store.

A tenant has its exporter's credential. The bus allows it requests on its job's subject only, but with any body and reply subject. So
this module sends only published versions of this very job, only to an inbox of this job, and handles one request of a job at a time.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from marlaas_api import subjects
from marlaas_api.bucket_cache import BucketCache
from marlaas_api.bus import Request
from marlaas_api.errors import InvalidInput, MarlaasError, Unreadable
from marlaas_api.messages import AdapterFile, AdapterPart, AdapterRequest, JobDocument, Manifest, Phase, Progress
from marlaas_api.messages.exports import PART_BYTES
from marlaas_api.names import JobRef
from marlaas_api.policy_manifest import find_manifest
from marlaas_api.retries import patiently
from marlaas_api.wire import decode_as, encode
from marlaas_worker.role import RoleContext

MAX_READS = 4
_MOST_MANIFESTS = 64
_RETRY_S, _LONGEST_PAUSE_S = 1.0, 60.0

log = logging.getLogger(__name__)


class PublishedAdapters:
    """Sends the files of published adapters, in parts, to the exporters that upload them. One object answers the requests for all jobs.

    Args:
        context: of the orchestrator's process.
        documents: cache of the bucket `jobs`.
        progress_of: returns a job's last progress, which names the published versions; None if the job has none.
    """

    def __init__(
        self,
        context: RoleContext,
        documents: BucketCache[JobDocument],
        progress_of: Callable[[JobRef], Progress | None],
    ) -> None:
        self._context, self._documents, self._progress_of = context, documents, progress_of
        self._in_work: set[str] = set()
        self._reads = asyncio.Semaphore(MAX_READS)
        self._manifests: dict[tuple[JobRef, str, int], Manifest] = {}

    async def serve(self) -> None:
        """Answer requests until cancelled.

        If listening fails, for example because the credential is of an earlier release, log the error and retry: training must go on.
        """
        async with asyncio.TaskGroup() as answers:
            what = "listening to exporters"
            listening = partial(self._listen, answers)
            await patiently(listening, what, _RETRY_S, longest_s=_LONGEST_PAUSE_S, retried=lambda _: True)

    async def _listen(self, answers: asyncio.TaskGroup) -> None:
        async def begin(request: Request) -> None:
            if request.subject not in self._in_work:  # else the exporter repeats it
                self._in_work.add(request.subject)
                answers.create_task(self._answer(request), name=f"answer {request.subject}")

        async with self._context.bus.listen(subjects.export("*", "*"), begin):
            await asyncio.Event().wait()

    async def _answer(self, request: Request) -> None:
        try:
            try:
                wanted = decode_as(AdapterRequest, request.data)
                part = await self._part_for(request, wanted)
            finally:
                self._in_work.discard(request.subject)  # before the answer, after which the next request comes
            if part is not None:
                await self._context.bus.send(request.reply, encode(part))
        except Unreadable as error:
            log.debug("ignored a request on %s: %s", request.subject, error)  # a tenant may send any number of them
        except Exception:  # tenants write requests, and the orchestrator would end for all of them
            log.exception("a request on %s is not answered", request.subject)

    async def _part_for(self, request: Request, wanted: AdapterRequest) -> AdapterPart | None:
        """Return the answer to a request, whose parsed body is `wanted`.

        Return None, so that no answer is sent, if the body names another job than the request's subject, or if the reply subject is another job's.
        """
        is_own = request.subject == subjects.export(wanted.namespace, wanted.job)
        if not is_own or not subjects.is_reply_of(wanted.namespace, wanted.job, request.reply):
            log.debug("ignored a request on %s that names another job or reply subject", request.subject)
            return None
        try:
            async with self._reads:
                return await self._part(wanted)
        except Unreadable as error:
            log.error("%s", error)
            return _part(wanted, error="a record of the job cannot be read by this orchestrator")
        except MarlaasError as error:
            return _part(wanted, error=str(error))

    async def _part(self, wanted: AdapterRequest) -> AdapterPart:
        files = (await self._manifest(wanted)).files
        if not wanted.file:
            listed = {name: AdapterFile(sha256=ref.sha256, size_bytes=ref.size_bytes) for name, ref in files.items()}
            return _part(wanted, files=listed)
        ref = files.get(wanted.file)
        if ref is None or not 0 <= wanted.offset <= ref.size_bytes:
            raise InvalidInput("the adapter has no such file, or none as long")
        return _part(wanted, data=await self._context.blobs.read(ref, wanted.offset, PART_BYTES))

    async def _manifest(self, wanted: AdapterRequest) -> Manifest:
        """Return the manifest of the wanted version. Raises InvalidInput unless the job has published it and uploads the agent's adapter."""
        document = self._documents.get(subjects.job_key(wanted.namespace, wanted.job))
        if document is None or document.uid != wanted.uid or document.deleted:
            raise InvalidInput("the job does not exist any more")
        progress = self._progress_of(document.ref)
        published = progress.published if progress is not None and progress.phase is Phase.SUCCEEDED else {}
        is_uploaded = any(wanted.agent in addresses for addresses in document.spec.uploads.values())
        if not is_uploaded or published.get(wanted.agent) != wanted.version:
            raise InvalidInput("the job publishes no such version, or does not upload it")
        key = document.ref, wanted.agent, wanted.version
        if key not in self._manifests:
            # A promoted version may be thousands of manifests away from the newest one, so what was found is kept.
            found = await find_manifest(self._context.bus, self._context.blobs, document, wanted.agent, wanted.version)
            if found is None:
                raise InvalidInput("the version's manifest does not exist")
            self._manifests[key] = found
            while len(self._manifests) > _MOST_MANIFESTS:
                del self._manifests[next(iter(self._manifests))]
        return self._manifests[key]


def _part(
    wanted: AdapterRequest, files: dict[str, AdapterFile] | None = None, data: bytes = b"", error: str = ""
) -> AdapterPart:
    return AdapterPart(**wanted.model_dump(), files=files or {}, data=data, error=error)
