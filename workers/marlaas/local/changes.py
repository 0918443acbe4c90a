"""Changes of a run while it goes on: jobs that are added, edited, suspended, resumed or cancelled. Commands may also ask for the progress.

A command writes a change as a file into the run's folder and waits; the runner applies it and answers, also as a file.
"""

import contextlib
import fcntl
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from marlaas.local.documents import merge
from marlaas.local.folder import OutFolder, write
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import JobDocument, Progress

ANSWER_S = 30.0
_POLL_S = 0.1


class RunChange(BaseModel):
    """One change.

    jobs: documents of jobs to add or edit. folders: of their manifests, by key. files: their manifests.
    suspend: by job key, whether the job shall be suspended. cancel: keys of jobs to end and forget. asks_progress: change
    nothing, and answer with the jobs' progress.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    jobs: tuple[JobDocument, ...] = ()
    folders: dict[str, Path] = {}
    files: tuple[str, ...] = ()
    suspend: dict[str, bool] = {}
    cancel: tuple[str, ...] = ()
    asks_progress: bool = False


class ChangeAnswer(BaseModel):
    """The runner's answer: one line for each job, the jobs' progress if it was asked for, or an error."""

    model_config = ConfigDict(frozen=True)
    lines: tuple[str, ...] = ()
    progress: tuple[Progress, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class ChangedJobs:
    """Jobs of a run after a change. written: documents to write. cancelled: documents of jobs to end."""

    jobs: tuple[JobDocument, ...]
    written: tuple[JobDocument, ...] = ()
    cancelled: tuple[JobDocument, ...] = ()
    lines: tuple[str, ...] = ()


def changed(
    jobs: Sequence[JobDocument],
    change: RunChange,
    progress: Mapping[str, Progress],
    pools: Sequence[str],
    seed: int | None = None,
) -> ChangedJobs:
    """Return the jobs after a change. Pure.

    Args:
        progress: by job key.
        pools: names of the run's pools.
        seed: replaces the seeds of added jobs, as it replaced those of the others.

    Raises:
        InvalidInput: a job is unknown or has ended, its pool is not part of the run, or a field changed that must not.
    """
    now = {job.ref.key: job for job in jobs}
    lines: list[str] = []
    for wanted in change.jobs:
        known = now.get(wanted.ref.key)
        now[wanted.ref.key] = job = _submitted(known, wanted, pools, seed)
        lines.append(f"{job.ref}: {'added' if known is None else 'unchanged' if job == known else 'changed'}")
    for key, suspend in change.suspend.items():
        job = now[key] = _suspended(_running(now, key, progress), suspend)
        lines.append(f"{job.ref}: {'suspended' if suspend else 'resumed'}")
    cancelled = [_running(now, key, progress) for key in change.cancel]
    for job in cancelled:
        del now[job.ref.key]
        lines.append(f"{job.ref}: cancelled; its files stay in the output folder")
    written = tuple(job for job in now.values() if job not in jobs)
    return ChangedJobs(tuple(now.values()), written, tuple(cancelled), tuple(lines))


def _submitted(known: JobDocument | None, wanted: JobDocument, pools: Sequence[str], seed: int | None) -> JobDocument:
    missing = [name for name in wanted.pools if name not in pools]
    if missing:
        raise InvalidInput(
            f"job {wanted.ref}: ModelPool {missing[0]} is not part of this run, whose pools are {', '.join(pools)}: "
            "use one of these, or start a run of its own"
        )
    wanted = wanted if seed is None else wanted.model_copy(update={"seed": seed})
    return merge([known] if known is not None else [], [wanted])[0]


def _suspended(job: JobDocument, suspend: bool) -> JobDocument:
    if job.spec.suspend == suspend:
        return job
    spec = job.spec.model_copy(update={"suspend": suspend})
    return job.model_copy(update={"spec": spec, "generation": job.generation + 1})


def _running(jobs: Mapping[str, JobDocument], key: str, progress: Mapping[str, Progress]) -> JobDocument:
    """Return a job that has not ended."""
    if key not in jobs:
        raise InvalidInput(f"job {key.replace('.', '/')} is not part of this run")
    job, last = jobs[key], progress.get(key)
    if last is not None and last.uid == job.uid and last.phase.final:
        raise InvalidInput(f"job {job.ref} has {last.phase.lower()}: a finished job cannot be changed")
    return job


def refuse_leftovers(folder: OutFolder, known: Sequence[JobDocument], wanted: Sequence[JobDocument]) -> None:
    """Raise InvalidInput if the folder of a new job has files of an earlier job, which was cancelled."""
    names = {job.ref.key for job in known}
    for job in wanted:
        if job.ref.key not in names and (folder.job(job.ref) / "steps.jsonl").exists():
            raise InvalidInput(
                f"{folder.job(job.ref)} has the files of a cancelled job of this name: move them away, or rename the job"
            )


# files ---------------------------------------------------------------------------------------------------------------


def is_running(folder: OutFolder) -> bool:
    """Return whether a `marlaas run` uses the folder now."""
    try:
        with (folder.state / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def ask(folder: OutFolder, change: RunChange, timeout_s: float = ANSWER_S) -> tuple[str, ...]:
    """Ask the runner of a folder for a change; return its lines. Raises as `asked`."""
    return asked(folder, change, timeout_s).lines


def asked(folder: OutFolder, change: RunChange, timeout_s: float = ANSWER_S) -> ChangeAnswer:
    """Ask the runner of a folder for a change; return its answer.

    Raises:
        InvalidInput: no run uses the folder, the runner refuses the change, or it does not answer in time.
    """
    name = f"{time.time_ns()}-{uuid.uuid4()}"
    question, reply = folder.changes / f"{name}.json", folder.changes / f"{name}.answer"
    if is_running(folder):
        write(question, change.model_dump_json().encode())
    until = time.monotonic() + timeout_s
    try:
        while is_running(folder) and time.monotonic() < until:
            if reply.exists():
                return _read(reply)
            time.sleep(_POLL_S)
    finally:
        is_untaken = question.exists()
        question.unlink(missing_ok=True)
        reply.unlink(missing_ok=True)
    if not is_running(folder):
        raise InvalidInput(f"no `marlaas run` uses {folder.root} now: start the run again, then repeat this command")
    outcome = "nothing was changed" if is_untaken else "it may still apply the change: see its output"
    raise InvalidInput(f"the run in {folder.root} did not answer within {timeout_s:.0f} s; {outcome}")


def _read(reply: Path) -> ChangeAnswer:
    answer = ChangeAnswer.model_validate_json(reply.read_bytes())
    if answer.error:
        raise InvalidInput(answer.error)
    return answer


@dataclass(frozen=True, slots=True)
class Question:
    """A change that a command asks for, and where its answer is written."""

    change: RunChange
    reply: Path

    def answer(self, answer: ChangeAnswer) -> None:
        """Answer it. Raises InvalidInput if the folder cannot be written."""
        write(self.reply, answer.model_dump_json().encode())


def take(folder: OutFolder, progress: Callable[[], tuple[Progress, ...]]) -> list[Question]:
    """Take the changes that are asked for, oldest first; each is taken once. One that cannot be read is refused.

    Questions for the progress are answered here.

    Args:
        progress: of all jobs, now.
    """
    found: list[Question] = []
    for path in sorted(folder.changes.glob("*.json")):
        reply = path.with_suffix(".answer")
        with contextlib.suppress(FileNotFoundError):
            content = path.read_bytes()
            path.unlink()
            try:
                question = Question(RunChange.model_validate_json(content), reply)
                if question.change.asks_progress:
                    question.answer(ChangeAnswer(progress=progress()))
                else:
                    found.append(question)
            except ValidationError:
                text = "the run was started by another version of marlaas: stop it, and start it again"
                write(reply, ChangeAnswer(error=text).model_dump_json().encode())
    return found


def forget(folder: OutFolder) -> None:
    """Delete what earlier commands and runs left."""
    for path in folder.changes.glob("*"):
        path.unlink(missing_ok=True)
