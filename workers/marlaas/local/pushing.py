"""The files of an adapter that go to the Hugging Face hub, and the uploads that `export.hub` asks for at the end of a run."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from marlaas.local.records import OpenedJob
from marlaas.model_card import CARD, CONFIG, Files, JobRecords, config_of, job_card, own_card, plain_files
from marlaas.models.hub import check_repository, require_token, upload
from marlaas.plots.figure import CURVE_FILE
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import JobDocument, Phase


@dataclass(frozen=True, slots=True)
class HubExporter:
    """Uploads the adapters of succeeded jobs with `export.hub`. marks: folder with the versions that were uploaded, a file for each agent.

    note: gets the addresses and the failures.
    """

    marks: Path
    note: Callable[[str], None]

    def push(self, job: OpenedJob) -> bool:
        """Upload what the hub lacks of a job, and return whether it has all. A failure of the hub is noted; `marlaas push` repeats it."""
        hub, progress = job.document.spec.export.hub, job.progress
        if hub is None or progress is None or progress.phase is not Phase.SUCCEEDED:
            return True
        named = job.document.spec.hub_repositories
        pushed = [self._push(job, at, name, progress.published.get(name, -1)) for name, at in named.items()]
        return all(pushed)

    def _push(self, job: OpenedJob, repository: str, agent: str, version: int) -> bool:
        hub = job.document.spec.export.hub
        mark = self.marks / f"{job.document.uid}.{agent}"
        if hub is None or version < 0 or (mark.exists() and mark.read_text() == str(version)):
            return True
        try:
            address = upload(repository, files_of(job, agent, repository), is_private=hub.private)
        except (InvalidInput, OSError, ValueError) as error:
            public = () if hub.private else ("--public",)
            again = shlex.join(["marlaas", "push", str(job.folder), repository, "--agent", agent, *public])
            self.note(f"{job.name}: spec.export.hub: {error}; then upload it with: {again}")
            return False
        self.marks.mkdir(parents=True, exist_ok=True)
        mark.write_text(str(version))
        self.note(f"{job.name}: version {version} of agent {agent} is at {address}")
        return True


def require_hub(job: JobDocument) -> None:
    """Check before a job plays that its adapters can be uploaded, as far as this machine knows. Raises InvalidInput."""
    if job.spec.export.hub is not None:
        try:
            require_token()
            for name in job.spec.hub_repositories.values():
                check_repository(name)
        except InvalidInput as error:
            raise InvalidInput(f"job {job.ref}: spec.export.hub: {error}") from None


def files_of(job: OpenedJob, agent: str, repository: str) -> Files:
    """Return the files of an agent's adapter by their names in the repository, with curve and card. Raises InvalidInput if the run has no such adapter."""
    adapter = job.adapter_of(agent)
    if not (adapter / CONFIG).is_file():
        raise InvalidInput(f"{job.name} has no adapter in {adapter} yet; a run writes it when it ends or is stopped")
    curve = job.folder / CURVE_FILE
    records = JobRecords(job.document, job.progress, job.steps(), job.evals(), curve.exists())
    card = own_card(adapter) or job_card(repository, records, agent, config_of(adapter))
    return plain_files(adapter) | ({CURVE_FILE: curve} if curve.exists() else {}) | {CARD: card.encode()}
