"""Step and evaluation records: written from the stream to `steps.jsonl` and `evals.jsonl`, and read from a run's output folder.

The files are always rewritten from the stream, so a record is in a file exactly once, however often the run was
stopped. `open_jobs` reads an output folder, also while its run goes on.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from marlaas.local.folder import OutFolder, RunRecord, write
from marlaas_api import subjects
from marlaas_api.bus import Bus
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import BusMessage, EvalRecord, JobDocument, PoolDocument, Progress, StepRecord
from marlaas_api.messages.agent_settings import AgentSettings
from marlaas_api.names import JobRef
from marlaas_api.wire import decode

R = TypeVar("R", StepRecord, EvalRecord)


def read_line(kind: type[R], line: bytes) -> R:
    """Parse a record that `RecordFile.write` wrote. null stands for NaN, which JSON lacks. Raises ValueError."""
    return kind.model_validate(_with_nan(json.loads(line)))


def _with_nan(value: object) -> object:
    if isinstance(value, dict):
        return {key: _with_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_nan(item) for item in value]
    return float("nan") if value is None else value


@dataclass(slots=True)
class RecordFile:
    """Records of one job; `read` adds new ones. Each is serialized once, and a file is replaced only if it changes."""

    ref: JobRef
    steps: dict[int, StepRecord] = field(default_factory=dict)
    evals: dict[int, EvalRecord] = field(default_factory=dict)
    _next_sequences: dict[str, int] = field(default_factory=dict)
    _lines: dict[tuple[str, int], str] = field(default_factory=dict)
    _written: dict[str, int] = field(default_factory=dict)

    async def read(self, bus: Bus) -> bool:
        """Read new records of the stream; return whether there were any. Raises the errors of `Bus.replay`."""
        names = [
            subject(self.ref.namespace, self.ref.name, "x", 0).rpartition(".")[0] + ".*"
            for subject in (subjects.step, subjects.evaluation)
        ]
        # A sequence for each subject: a step may be stored after the steps were read, and before an evaluation is.
        found = {name: await bus.replay(subjects.STEPS, name, self._next_sequences.get(name, 1)) for name in names}
        for name, stored in found.items():  # after both were read: an error must not hide that there are new records
            for item in stored:
                self.add(decode(item.data))
                self._next_sequences[name] = item.sequence + 1
        return any(found.values())

    def add(self, message: BusMessage) -> None:
        """Add one record, unless it belongs to an earlier job of the same name."""
        if isinstance(message, StepRecord) and message.uid == self.ref.uid:
            self.steps.setdefault(message.step, message)
        elif isinstance(message, EvalRecord) and message.uid == self.ref.uid:
            self.evals.setdefault(message.version, message)

    def in_order(self) -> tuple[tuple[StepRecord, ...], tuple[EvalRecord, ...]]:
        """Return steps by number and evaluations by version."""
        return tuple(self.steps[key] for key in sorted(self.steps)), tuple(
            self.evals[key] for key in sorted(self.evals)
        )

    def write(self, folder: OutFolder) -> None:
        """Write the files that have new records or are missing. Raises InvalidInput if the folder cannot be written."""
        for name, records in (("steps.jsonl", self.steps), ("evals.jsonl", self.evals)):
            path = folder.job(self.ref) / name
            if self._written.get(name) != len(records) or not path.exists():
                write(path, "".join(self._line(name, key, records[key]) for key in sorted(records)).encode())
                self._written[name] = len(records)

    def _line(self, name: str, key: int, record: StepRecord | EvalRecord) -> str:
        if (name, key) not in self._lines:
            self._lines[name, key] = f"{record.model_dump_json()}\n"
        return self._lines[name, key]


@dataclass(frozen=True, slots=True)
class OpenedJob:
    """One job of a run. `folder` holds its output files; `pools`, by name, tell the base models of its agents.

    progress: published when the run ended or was stopped; None while the first one goes on.
    """

    document: JobDocument
    pools: Mapping[str, PoolDocument]
    folder: Path
    progress: Progress | None = None

    @property
    def name(self) -> str:
        """Name as `<namespace>/<name>`."""
        return str(self.document.ref)

    def pool_of(self, agent: AgentSettings) -> PoolDocument:
        """Return the pool of one of its agents."""
        return self.pools[self.document.pool_of(agent)]

    def adapter_of(self, agent: str) -> Path:
        """Return the folder of an agent's adapter, which the run writes when it ends or is stopped."""
        return self.folder / "adapter" / ("" if len(self.document.spec.agents) == 1 else agent)

    def steps(self) -> tuple[StepRecord, ...]:
        """Return its finished steps, in order. Raises InvalidInput if the file cannot be parsed."""
        return _records(StepRecord, self.folder / "steps.jsonl")

    def evals(self) -> tuple[EvalRecord, ...]:
        """Return its evaluations by version. Raises InvalidInput."""
        return _records(EvalRecord, self.folder / "evals.jsonl")


def open_jobs(folder: Path, job: str | None = None) -> tuple[OpenedJob, ...]:
    """Return the jobs of an output folder, or of a job's own folder within one.

    `job` (`name` or `namespace/name`) selects one. Raises InvalidInput if there is no such folder, or no such job
    in it.
    """
    out, inside = _out_folder(folder)
    record = out.read_record()
    jobs = [_opened(out, record, document) for document in record.jobs]
    found = [one for one in jobs if (inside is None or one.folder == inside) and _is_named(one, job)]
    if not found:
        raise InvalidInput(
            f"{folder} has no job {job or inside}: its jobs are {', '.join(one.name for one in jobs) or 'not known yet'}"
        )
    return tuple(found)


def open_job(folder: Path, job: str | None = None) -> OpenedJob:
    """Return the selected job. Raises InvalidInput, also if several match."""
    jobs = open_jobs(folder, job)
    if len(jobs) > 1:
        raise InvalidInput(
            f"{folder} has several jobs: choose one with --job {' or --job '.join(one.name for one in jobs)}"
        )
    return jobs[0]


def _out_folder(folder: Path) -> tuple[OutFolder, Path | None]:
    root = folder.absolute()
    if _is_run(root):
        return OutFolder(root), None
    if len(root.parents) >= 2 and _is_run(root.parents[1]):
        return OutFolder(root.parents[1]), root
    raise InvalidInput(f"{folder} is not an output folder of `marlaas run`: it has no .state/run.json")


def _is_run(root: Path) -> bool:
    return (root / ".state" / "run.json").is_file()


def _opened(out: OutFolder, record: RunRecord, document: JobDocument) -> OpenedJob:
    pools = {pool.name: pool for pool in record.pools if pool.name in document.pools}
    if missing := document.pools - set(pools):
        raise InvalidInput(f"{out.root}: its record lacks pool {min(missing)}")
    progress = next((one for one in record.progress if one.uid == document.uid), None)
    return OpenedJob(document, pools, out.job(document.ref), progress)


def _is_named(one: OpenedJob, job: str | None) -> bool:
    return job is None or job in (one.name, one.document.job, one.document.ref.key)


def _records(kind: type[R], path: Path) -> tuple[R, ...]:
    try:
        return tuple(read_line(kind, line) for line in path.read_bytes().splitlines())
    except FileNotFoundError:
        return ()
    except ValueError as error:
        raise InvalidInput(f"{path} has a line that this version of marlaas cannot read") from error
