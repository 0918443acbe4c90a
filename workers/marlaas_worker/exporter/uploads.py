"""Uploads as destinations: once a job has succeeded, hub, bucket or volume gets each trained agent's adapter, with a model card and a curve.

The files of a published adapter are fetched from the orchestrator, part by part: an exporter cannot read the blob store.
"""

import asyncio
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from marlaas.adapter_folder import Files
from marlaas.model_card import JobRecords, config_of, files_with, job_card
from marlaas.models.hub import require_token
from marlaas.plots.figure import draw_curve
from marlaas.trackers.seam import End
from marlaas.uploads import BucketTarget, HubTarget, UploadTarget, VolumeTarget, marker_of
from marlaas_api import subjects
from marlaas_api.bus import Bus, Request
from marlaas_api.errors import InvalidInput, Retryable, Unreadable
from marlaas_api.messages import AdapterFile, AdapterPart, AdapterRequest, EvalRecord, JobDocument, Phase, StepRecord
from marlaas_api.messages.job_spec import ExportSettings, Upload
from marlaas_api.wire import decode_as, encode
from marlaas_worker.exporter.destinations import JobView
from marlaas_worker.exporter.reader import JobReader

ANSWER_S = 10.0
"""Time without an answer after which a request is repeated."""
ATTEMPTS = 6

log = logging.getLogger(__name__)
T = TypeVar("T")

S3_FOLDER, VOLUME = "MARLAAS_S3_FOLDER", "MARLAAS_EXPORT_VOLUME"
"""Environment variables that name the folders where the Secret of `export.s3` and the claim of `export.volume` are mounted."""
_WHERE: Mapping[Upload, str] = {
    "hub": "in a cluster the token comes from export.hub.tokenSecretRef, and the network from export.egress",
    "s3": "in a cluster they are keys of the Secret export.s3.secretRef, and export.egress must allow the store",
    "volume": "in a cluster the folder is on the claim of export.volume, where it must be writable for the group 10001",
}
_S3_KEYS = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION"),
    *("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "AWS_SKIP_SIGNATURE"),
)
_DRAWING = threading.Lock()
"""Held while a curve is drawn: targets upload in several threads, and matplotlib is not thread-safe."""


class NotFetched(Retryable):
    """The adapter, or a part of it, could not be fetched; the text says why."""


class JobSource(Protocol):
    """Source of the records and adapter files that uploads send. Calls block, and come from several threads."""

    def records(self, view: JobView) -> JobRecords:
        """Return all records of the job, which are kept until `forget`. view: names the progress up to which steps must be there.

        Raises: NotFetched if one of these steps is missing, and the errors of `JobReader.read`.
        """
        ...

    def forget(self) -> None:
        """Drop the records that `records` has kept, to free memory; its next call reads all again."""
        ...

    def files(self, agent: str, version: int) -> Mapping[str, AdapterFile]:
        """Return size and sha256 of each file of an adapter, by name. Raises NotFetched, and the errors of the bus."""
        ...

    def fetch(self, agent: str, version: int, files: Mapping[str, AdapterFile], folder: Path) -> None:
        """Download files of an adapter's version into a folder. files: as `files` returned them. Raises as `download`, and the errors of the bus."""
        ...


@dataclass(slots=True)
class BusSource:
    """`JobSource` that reads records and adapters over the bus. Other threads call it; it runs the calls of the bus in an event loop.

    Attributes:
        first: the document with which the exporter started; it names the job.
        loop: the event loop of the bus. Calls from its own thread would deadlock.
    """

    bus: Bus
    first: JobDocument
    loop: asyncio.AbstractEventLoop
    _reader: JobReader | None = None
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    def records(self, view: JobView) -> JobRecords:
        return self._wait(self._records(view))

    def forget(self) -> None:
        self._reader = None

    def files(self, agent: str, version: int) -> Mapping[str, AdapterFile]:
        return self._ask(self._whole(agent, version)).files

    def fetch(self, agent: str, version: int, files: Mapping[str, AdapterFile], folder: Path) -> None:
        download(self._whole(agent, version), files, folder, self._ask)

    def _whole(self, agent: str, version: int) -> AdapterRequest:
        ref = self.first.ref
        return AdapterRequest(namespace=ref.namespace, job=ref.name, uid=ref.uid, agent=agent, version=version)

    def _ask(self, wanted: AdapterRequest) -> AdapterPart:
        return self._wait(self._answer(wanted))

    async def _answer(self, wanted: AdapterRequest) -> AdapterPart:
        async with self._asking:  # the orchestrator ignores a job's second request at a time
            return await ask(self.bus, wanted)

    async def _records(self, view: JobView) -> JobRecords:
        """Read the job's records. They are large, so they are kept only until `forget`: an upload that is retried reads only new ones."""
        async with self._reading:
            reader = self._reader = self._reader or JobReader(self.bus, self.first, kept=[])
            await reader.read()
        steps = [one for one in reader.kept or () if isinstance(one, StepRecord)]
        evals = [one for one in reader.kept or () if isinstance(one, EvalRecord)]
        if view.progress is None or len(steps) < view.progress.step:
            raise NotFetched(f"only {len(steps)} of the job's steps can be read yet")
        return JobRecords(view.document, view.progress, tuple(steps), tuple(evals), has_curve=bool(steps))

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self.loop).result()


@dataclass(slots=True)
class UploadDestination:
    """`Destination` that uploads the last adapter of each trained agent to one target, once the job has succeeded.

    Attributes:
        target: the hub, bucket or volume.
        source: reads the job's records and adapter files.
        folder: for downloaded files; removed after each upload.
        uploaded: marks of all uploaded versions (`TARGET AGENT@vVERSION`). All targets of the job share this list.
        url: address of the uploaded adapter; if the target gets several agents' adapters, address of the folder above. Empty if it
            is unknown or no URL.
    """

    target: UploadTarget
    source: JobSource
    folder: Path
    uploaded: list[str]
    url: str = ""

    @property
    def name(self) -> str:
        return self.target.name

    def lacks(self, view: JobView) -> bool:
        return bool(self._due(view))

    def deliver(self, view: JobView) -> None:
        addresses = view.document.spec.uploads.get(self.target.name, {})
        refusals: dict[str, InvalidInput] = {}
        for agent, version in self._due(view).items():
            try:
                self.target.require([addresses[agent]])
                self._upload(view, agent, version, addresses[agent])
                self.uploaded.append(self._mark(agent, version))
            except InvalidInput as error:  # of the target or its client; other agents' adapters may be taken
                refusals[str(error)] = error
        if refusals:
            raise InvalidInput(f"{'; '.join(refusals)}; {_WHERE[self.target.name]}") from next(iter(refusals.values()))
        self.source.forget()

    def close(self, end: End | None) -> None:
        return None

    def _due(self, view: JobView) -> dict[str, int]:
        """Return the version to upload by agent: the last published one, unless it is marked as uploaded. Empty unless the job has succeeded."""
        progress = view.progress
        if progress is None or progress.phase is not Phase.SUCCEEDED:
            return {}
        agents = view.document.spec.uploads.get(self.target.name, {})
        versions = {agent: progress.published.get(agent, -1) for agent in agents}
        return {agent: at for agent, at in versions.items() if at >= 0 and self._mark(agent, at) not in self.uploaded}

    def _upload(self, view: JobView, agent: str, version: int, address: str) -> None:
        ref, files = view.document.ref, self.source.files(agent, version)
        digests = {name: file.sha256 for name, file in files.items()}
        marker = marker_of(digests, job=str(ref), uid=ref.uid, agent=agent, version=version)
        if self.target.has(address, marker):
            return
        records, folder = self.source.records(view), self.folder / f"{agent}@v{version}"
        self.source.fetch(agent, version, files, folder)
        address = self.target.put(address, self._with_card(records, agent, folder, address), marker)
        if address.startswith("http"):
            self.url = address if len(view.document.spec.uploads[self.target.name]) == 1 else address.rpartition("/")[0]
        shutil.rmtree(self.folder, ignore_errors=True)

    def _with_card(self, records: JobRecords, agent: str, folder: Path, address: str) -> Files:
        document, curve = records.document, None
        if records.has_curve:
            with _DRAWING:
                curve = draw_curve(str(document.ref), records.steps, records.evals, document.spec.rollout.group_size)
        return files_with(folder, job_card(self.target.loaded_as(address), records, agent, config_of(folder)), curve)

    def _mark(self, agent: str, version: int) -> str:
        return f"{self.target.name} {agent}@v{version}"


def remote_target(name: Upload, export: ExportSettings) -> UploadTarget:
    """Return the hub, bucket or volume of a job as its exporter uses it: with the Secrets and claims that the kubelet has mounted."""
    if name == "hub":
        return HubTarget(export.hub is None or export.hub.private, ready=_read_token)
    if name == "s3":
        return BucketTarget(_bucket_variables)
    return VolumeTarget(Path(os.environ.get(VOLUME, "/not-mounted")))


def drop_aws_variables() -> None:
    """Remove all AWS_ variables from this process. They are for a tracker; the bucket's client would use them for keys that its Secret lacks."""
    for variable in [one for one in os.environ if one.startswith("AWS_")]:
        del os.environ[variable]


def _read_token() -> None:
    """Set HF_TOKEN to the token of the Secret, which may have been corrected since the last call. Raises InvalidInput without one."""
    token = _mounted("HF_TOKEN_PATH")
    if not token:
        raise InvalidInput("there is no token")
    os.environ["HF_TOKEN"] = token
    require_token()


def _bucket_variables() -> dict[str, str]:
    """Return the AWS_ variables in the bucket's Secret, which may have been corrected since the last call. Raises InvalidInput for an unknown key."""
    with suppress(KeyError, OSError):
        given = {one.name for one in Path(os.environ[S3_FOLDER]).iterdir() if one.name.startswith("AWS_")}
        if unknown := sorted(given.difference(_S3_KEYS)):
            raise InvalidInput(f"the Secret has {unknown[0]}, which is not used; the keys are {', '.join(_S3_KEYS)}")
    return {key: found for key in _S3_KEYS if (found := _mounted(S3_FOLDER, key))}


def _mounted(variable: str, key: str = "") -> str:
    """Return the text of a mounted file; empty if the variable is not set or the file cannot be read.

    variable: environment variable with the file's path; or, with `key`, with the path of a folder that has a file of that name.
    """
    try:
        return Path(os.environ[variable], key).read_text(encoding="utf-8").strip()
    except (KeyError, OSError, ValueError):
        return ""


async def ask(bus: Bus, wanted: AdapterRequest) -> AdapterPart:
    """Request a part of an adapter from the orchestrator; return its answer. Raises NotFetched (refused, or no answer), and the errors of the bus."""
    answer = asyncio.get_running_loop().create_future()

    async def receive(request: Request) -> None:
        if not request.data:  # NATS sends an empty reply if no orchestrator listens
            return
        try:
            part = decode_as(AdapterPart, request.data)
        except Unreadable as error:
            log.error("ignored an answer of the orchestrator: %s", error)
        else:
            if not answer.done():
                answer.set_result(part)

    inbox = bus.new_inbox()
    async with bus.listen(inbox, receive):
        for _ in range(ATTEMPTS):
            await bus.send(subjects.export(wanted.namespace, wanted.job), encode(wanted), inbox)
            done, _ = await asyncio.wait([answer], timeout=ANSWER_S)
            if done:
                return _checked(wanted, answer.result())
    what = f"version {wanted.version} of agent {wanted.agent}"
    advice = "It may be away; after an upgrade, NATS must be restarted once"
    raise NotFetched(f"the orchestrator has not answered {ATTEMPTS} requests for {what}. {advice}")


def _checked(wanted: AdapterRequest, part: AdapterPart) -> AdapterPart:
    if part.error:
        raise NotFetched(f"version {wanted.version} of agent {wanted.agent}: {part.error}")
    return part


def download(
    whole: AdapterRequest,
    files: Mapping[str, AdapterFile],
    folder: Path,
    answer_to: Callable[[AdapterRequest], AdapterPart],
) -> None:
    """Download files of an adapter's version into a folder, and verify their sha256. A partial file in the folder is continued.

    Args:
        whole: request that names the adapter's version and no file.
        files: size and sha256 of each file, by name, as in the answer to `whole`.
        answer_to: sends a request and waits for the answer, as `ask`; it blocks.

    Raises:
        NotFetched: as `ask`, or a file does not have the size and sha256 of `files`, or its name is a path.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in files.items():
        if Path(name).name != name:
            raise NotFetched(f"the adapter has a file of the name {name!r}")
        _download(whole.model_copy(update={"file": name}), file, folder / name, answer_to)


def _download(
    wanted: AdapterRequest, file: AdapterFile, path: Path, answer_to: Callable[[AdapterRequest], AdapterPart]
) -> None:
    offset = path.stat().st_size if path.exists() else 0
    with path.open("ab") as target:
        while offset < file.size_bytes:
            data = answer_to(wanted.model_copy(update={"offset": offset})).data
            if not data:
                raise NotFetched(f"file {wanted.file} ends at byte {offset} of {file.size_bytes}")
            target.write(data)
            offset += len(data)
    with path.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    if digest != file.sha256:
        path.unlink()
        raise NotFetched(f"file {wanted.file} has sha256 {digest}, expected {file.sha256}")
