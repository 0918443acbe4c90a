"""Fetches the files of a published adapter from the orchestrator, part by part: an exporter cannot read the blob store."""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from marlaas_api import subjects
from marlaas_api.bus import Bus, Request
from marlaas_api.errors import Retryable, Unreadable
from marlaas_api.messages import AdapterFile, AdapterPart, AdapterRequest
from marlaas_api.wire import decode_as, encode

ANSWER_S = 10.0
"""Time without an answer after which a request is repeated."""
ATTEMPTS = 6

log = logging.getLogger(__name__)


class NotFetched(Retryable):
    """The adapter, or a part of it, could not be fetched; the text says why."""


async def ask(bus: Bus, wanted: AdapterRequest) -> AdapterPart:
    """Request a part of an adapter from the orchestrator; return its answer. Raises NotFetched (refused, or no answer), and the errors of the bus."""
    answer = asyncio.get_running_loop().create_future()

    async def receive(request: Request) -> None:
        if not request.data:  # so NATS answers while nobody listens
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
