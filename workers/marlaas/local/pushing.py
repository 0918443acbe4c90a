"""The files of an adapter that are uploaded, and the uploads that `export` asks for at the end of a run."""

import hashlib
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from marlaas.adapter_folder import CONFIG, Files, plain_files
from marlaas.local.folder import translated
from marlaas.local.records import OpenedJob
from marlaas.model_card import JobRecords, config_of, files_with, job_card, own_card
from marlaas.plots.figure import CURVE_FILE
from marlaas.uploads import UploadTarget, marker_of, own_target
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import JobDocument, Phase


@dataclass(frozen=True, slots=True)
class Uploader:
    """Uploads the adapters of succeeded jobs. marks: folder with the versions that were uploaded, a file for each target and agent.

    note: gets the addresses and the failures.
    """

    marks: Path
    note: Callable[[str], None]

    def push(self, job: OpenedJob) -> bool:
        """Upload what the job's targets lack, and return whether they have all. A failure is noted; `marlaas push` repeats it."""
        spec, progress = job.document.spec, job.progress
        if progress is None or progress.phase is not Phase.SUCCEEDED:
            return True
        pushed = [
            self._push(job, own_target(name, spec.export), address, agent)
            for name, addresses in spec.uploads.items()
            for agent, address in addresses.items()
        ]
        return all(pushed)

    def _push(self, job: OpenedJob, target: UploadTarget, address: str, agent: str) -> bool:
        version = job.progress.published.get(agent, -1) if job.progress is not None else -1
        mark = self.marks / f"{target.name}.{job.document.uid}.{agent}"
        if version < 0 or (mark.exists() and mark.read_text() == str(version)):
            return True
        try:
            target.require([address])
            marker = marker_in(job, agent)
            if not target.has(address, marker):
                address = target.put(address, files_of(job, agent, target.loaded_as(address)), marker)
        except (InvalidInput, OSError, ValueError) as error:
            hub = job.document.spec.export.hub
            public = ["--public"] if target.name == "hub" and hub is not None and not hub.private else []
            again = shlex.join(["marlaas", "push", str(job.folder), address, "--agent", agent, *public])
            self.note(f"{job.name}: spec.export.{target.name}: {error}; then upload it with: {again}")
            return False
        self.marks.mkdir(parents=True, exist_ok=True)
        mark.write_text(str(version))
        self.note(f"{job.name}: version {version} of agent {agent} is at {address}")
        return True


def require_targets(job: JobDocument) -> None:
    """Check before a job plays that its adapters can be uploaded, as far as this machine knows. Raises InvalidInput."""
    for name, addresses in job.spec.uploads.items():
        try:
            own_target(name, job.spec.export).require(addresses.values())
        except InvalidInput as error:
            raise InvalidInput(f"job {job.ref}: spec.export.{name}: {error}") from None


def files_of(job: OpenedJob, agent: str, loaded_as: str) -> Files:
    """Return the files of an agent's adapter by name, with curve and card. Raises InvalidInput if the run has no such adapter."""
    adapter, curve = _adapter(job, agent), job.folder / CURVE_FILE
    records = JobRecords(job.document, job.progress, job.steps(), job.evals(), curve.exists())
    card = own_card(adapter) or job_card(loaded_as, records, agent, config_of(adapter))
    return files_with(adapter, card, curve if curve.exists() else None)


def marker_in(job: OpenedJob, agent: str) -> bytes:
    """Return the marker of the version of an agent's adapter that the run has written. Raises InvalidInput."""
    version = job.progress.published.get(agent) if job.progress is not None else None
    return folder_marker(_adapter(job, agent), job=job.name, uid=job.document.uid, agent=agent, version=version)


def folder_marker(adapter: Path, **told: object) -> bytes:
    """Return the marker of an adapter's folder. told: what it says besides. Raises InvalidInput."""
    digests = {}
    with translated(adapter):
        for name, path in plain_files(adapter).items():
            assert isinstance(path, Path)
            with path.open("rb") as file:
                digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return marker_of(digests, **told)


def _adapter(job: OpenedJob, agent: str) -> Path:
    adapter = job.adapter_of(agent)
    if not (adapter / CONFIG).is_file():
        raise InvalidInput(f"{job.name} has no adapter in {adapter} yet; a run writes it when it ends or is stopped")
    return adapter
