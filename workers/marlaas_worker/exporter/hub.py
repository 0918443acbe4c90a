"""The hub as a destination of a job: uploads the adapter of every trained agent once the job has succeeded, with card and curve."""

import asyncio
import os
import shutil
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from marlaas.model_card import CARD, Files, JobRecords, config_of, job_card, plain_files
from marlaas.models.hub import require_token, upload
from marlaas.plots.figure import CURVE_FILE, draw_curve
from marlaas.trackers.seam import End
from marlaas_api.bus import Bus
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import AdapterRequest, EvalRecord, JobDocument, Phase, StepRecord
from marlaas_worker.exporter.destinations import JobView
from marlaas_worker.exporter.downloads import NotFetched, ask, download
from marlaas_worker.exporter.reader import JobReader

T = TypeVar("T")


class JobSource(Protocol):
    """Where the hub's destination gets what it uploads. Calls block."""

    def records(self, view: JobView) -> JobRecords:
        """Return the job's records, all of them. Raises NotFetched, and the errors of `JobReader.read`."""
        ...

    def fetch(self, agent: str, version: int, folder: Path) -> None:
        """Write an adapter's files into a folder, as `download`."""
        ...


@dataclass(frozen=True, slots=True)
class BusSource:
    """Reads records and adapters over the bus, whose calls run in `loop`, for callers in other threads."""

    bus: Bus
    first: JobDocument
    loop: asyncio.AbstractEventLoop

    def records(self, view: JobView) -> JobRecords:
        return self._wait(self._records(view))

    def fetch(self, agent: str, version: int, folder: Path) -> None:
        ref = self.first.ref
        whole = AdapterRequest(namespace=ref.namespace, job=ref.name, uid=ref.uid, agent=agent, version=version)
        download(whole, folder, lambda wanted: self._wait(ask(self.bus, wanted)))

    async def _records(self, view: JobView) -> JobRecords:
        """Read all records anew: the exporter keeps none of them, because of their size."""
        reader = JobReader(self.bus, self.first, kept=[])
        await reader.read()
        steps = [one for one in reader.kept or () if isinstance(one, StepRecord)]
        evals = [one for one in reader.kept or () if isinstance(one, EvalRecord)]
        if view.progress is None or len(steps) < view.progress.step:
            raise NotFetched(f"only {len(steps)} of the job's steps can be read yet")
        return JobRecords(view.document, view.progress, tuple(steps), tuple(evals), has_curve=bool(steps))

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self.loop).result()


@dataclass(slots=True)
class HubDestination:
    """The hub. uploaded: marks of the versions that it has. folder: for one adapter at a time."""

    source: JobSource
    folder: Path
    uploaded: list[str] = field(default_factory=list)
    url: str = ""

    @property
    def name(self) -> str:
        return "hub"

    def lacks(self, view: JobView) -> bool:
        return bool(self._due(view))

    def deliver(self, view: JobView) -> None:
        due = self._due(view)
        hub, repositories = view.document.spec.export.hub, view.document.spec.hub_repositories
        if hub is None or not due:
            return
        try:
            _read_token()
            require_token()
            records = self.source.records(view)
            for agent, version in due.items():
                address = upload(repositories[agent], self._files(records, agent, version), is_private=hub.private)
                self.uploaded.append(_mark(agent, version))
                self.url = address if len(repositories) == 1 else address.rpartition("/")[0]
                shutil.rmtree(self.folder, ignore_errors=True)
        except InvalidInput as error:  # of the hub or its client
            where = "in a cluster the token comes from export.hub.tokenSecretRef, and the network from export.egress"
            raise InvalidInput(f"{error}; {where}") from error

    def close(self, end: End | None) -> None:
        return None

    def _due(self, view: JobView) -> dict[str, int]:
        """Return the versions that the hub lacks, by agent; empty unless the job has succeeded."""
        progress = view.progress
        if progress is None or progress.phase is not Phase.SUCCEEDED:
            return {}
        versions = {agent: progress.published.get(agent, -1) for agent in view.document.spec.hub_repositories}
        return {agent: at for agent, at in versions.items() if at >= 0 and _mark(agent, at) not in self.uploaded}

    def _files(self, records: JobRecords, agent: str, version: int) -> Files:
        """Fetch an adapter, and return what its repository gets."""
        document, folder = records.document, self.folder / _mark(agent, version)
        self.source.fetch(agent, version, folder)
        files = plain_files(folder)
        if records.has_curve:
            size = document.spec.rollout.group_size
            files[CURVE_FILE] = draw_curve(str(document.ref), records.steps, records.evals, size)
        card = job_card(document.spec.hub_repositories[agent], records, agent, config_of(folder))
        return files | {CARD: card.encode()}


def _read_token() -> None:
    """Set HF_TOKEN to the token of the Secret, which may have been corrected since the last call. Raises InvalidInput without one."""
    try:
        token = Path(os.environ["HF_TOKEN_PATH"]).read_text(encoding="utf-8").strip()
    except (KeyError, OSError, ValueError):
        token = ""
    if not token:
        raise InvalidInput("there is no token")
    os.environ["HF_TOKEN"] = token


def _mark(agent: str, version: int) -> str:
    return f"{agent}@v{version}"
