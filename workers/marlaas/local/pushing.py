"""The files of an adapter that go to the Hugging Face hub, and the uploads that `export.hub` asks for at the end of a run."""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from marlaas.local.card import job_card
from marlaas.local.curves import CURVE_FILE
from marlaas.local.records import OpenedJob
from marlaas.models.hub import check_repository, require_token, upload
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import JobDocument, Phase

CONFIG, CARD = "adapter_config.json", "README.md"
Files = dict[str, Path | bytes]


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
        versions = progress.versions | progress.promoted
        named = repositories(job.document)
        pushed = [self._push(job, at, name, versions.get(name, -1)) for name, at in named.items()]
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


def repositories(job: JobDocument) -> dict[str, str]:
    """Return the repository of each trained agent's adapter by the agent's name; empty without `export.hub`."""
    hub, trained = job.spec.export.hub, [one.name for one in job.spec.policies if one.trainable]
    return {} if hub is None else {name: hub.repository(name, len(trained)) for name in trained}


def require_hub(job: JobDocument) -> None:
    """Check before a job plays that its adapters can be uploaded, as far as this machine knows. Raises InvalidInput."""
    if job.spec.export.hub is not None:
        try:
            require_token()
            for name in repositories(job).values():
                check_repository(name)
        except InvalidInput as error:
            raise InvalidInput(f"job {job.ref}: spec.export.hub: {error}") from None


def files_of(job: OpenedJob, agent: str, repository: str) -> Files:
    """Return the files of an agent's adapter by their names in the repository, with curve and card. Raises InvalidInput if the run has no such adapter."""
    adapter = job.adapter_of(agent)
    if not (adapter / CONFIG).is_file():
        raise InvalidInput(f"{job.name} has no adapter in {adapter} yet; a run writes it when it ends or is stopped")
    card = own_card(adapter) or job_card(repository, job, agent, config_of(adapter))
    curve = job.folder / CURVE_FILE
    return plain_files(adapter) | ({CURVE_FILE: curve} if curve.exists() else {}) | {CARD: card.encode()}


def plain_files(adapter: Path) -> Files:
    """Return the files of an adapter's folder by name."""
    return {one.name: one for one in sorted(adapter.iterdir()) if one.is_file()}


def own_card(adapter: Path) -> str:
    """Return the card that a user has put into an adapter's folder; empty without one."""
    return (adapter / CARD).read_text(encoding="utf-8") if (adapter / CARD).is_file() else ""


def config_of(adapter: Path) -> dict[str, object]:
    """Return PEFT's configuration of an adapter. Raises InvalidInput."""
    try:
        found = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInput(f"{adapter / CONFIG} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidInput(f"{adapter / CONFIG} is no JSON object")
    return found
