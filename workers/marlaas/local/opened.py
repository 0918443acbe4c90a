"""Read-only access to an output folder of `marlaas run`, also while the run goes on."""

from dataclasses import dataclass
from pathlib import Path

from marlaas.local.folder import OutFolder, RunRecord
from marlaas.local.record import R, read_line
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import EvalRecord, JobDocument, PoolDocument, StepRecord


@dataclass(frozen=True, slots=True)
class OpenedJob:
    """One job of a run. `folder` holds its output files; `pool` names its base model."""

    document: JobDocument
    pool: PoolDocument
    folder: Path

    @property
    def name(self) -> str:
        """Name as `<namespace>/<name>`."""
        return str(self.document.ref)

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
            f"{folder} has no job {job or inside}: it has {', '.join(one.name for one in jobs) or 'none yet'}"
        )
    return tuple(found)


def open_job(folder: Path, job: str | None = None) -> OpenedJob:
    """Return the selected job. Raises InvalidInput, also if several match."""
    jobs = open_jobs(folder, job)
    if len(jobs) > 1:
        raise InvalidInput(f"{folder} has several jobs: say --job {' or --job '.join(one.name for one in jobs)}")
    return jobs[0]


def _out_folder(folder: Path) -> tuple[OutFolder, Path | None]:
    root = folder.absolute()
    if _is_run(root):
        return OutFolder(root), None
    if len(root.parents) >= 2 and _is_run(root.parents[1]):
        return OutFolder(root.parents[1]), root
    raise InvalidInput(f"{folder} is no output folder of `marlaas run`: expected one with .state/run.json in it")


def _is_run(root: Path) -> bool:
    return (root / ".state" / "run.json").is_file()


def _opened(out: OutFolder, record: RunRecord, document: JobDocument) -> OpenedJob:
    pool = next((pool for pool in record.pools if pool.name == document.pool), None)
    if pool is None:
        raise InvalidInput(f"{out.root}: its record does not say which base model pool {document.pool} has")
    return OpenedJob(document, pool, out.job(document.ref))


def _is_named(one: OpenedJob, job: str | None) -> bool:
    return job is None or job in (one.name, one.document.job, one.document.ref.key)


def _records(kind: type[R], path: Path) -> tuple[R, ...]:
    try:
        return tuple(read_line(kind, line) for line in path.read_bytes().splitlines())
    except FileNotFoundError:
        return ()
    except ValueError as error:
        raise InvalidInput(f"{path} holds a line that this version of marlaas did not write") from error
