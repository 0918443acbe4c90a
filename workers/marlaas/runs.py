"""`marlaas run` from Python: start runs, wait for them, and read their steps, evaluations, episodes and adapters, also while they go on."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from marlaas.episodes import files
from marlaas.episodes.record import EpisodeRecord
from marlaas.local.changes import is_running
from marlaas.local.folder import OutFolder
from marlaas.local.records import OpenedJob, open_job, open_jobs
from marlaas_api.errors import InvalidInput, MarlaasError
from marlaas_api.kinds import Kind
from marlaas_api.messages import EvalRecord, StepRecord

T = TypeVar("T")
POLL_S = 0.2


class RunFailed(MarlaasError):
    """A run ended otherwise than with all jobs succeeded. code: the exit code of `marlaas run`."""

    def __init__(self, code: int, output: str) -> None:
        super().__init__(f"marlaas run ended with exit code {code}: {output}")
        self.code = code


class Run:
    """A run on this machine, by its output folder: one that `start` has begun, or any other, running or ended. `await run` is `wait`.

    Args:
        folder: output folder of `marlaas run`.

    Methods that read a job take its name, as `name` or `namespace/name`; a run of one job needs none. They raise InvalidInput if
    there is no such job.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, *manifests: str | Path | Kind, out: str | Path, options: Sequence[str] = ()) -> "Run":
        """Start `marlaas run` in the background; it continues a run that stopped in the same folder.

        The run outlives this object and this process: `stop` drains it.

        Args:
            manifests: files, or objects such as `RLJob`, which are written to `manifests.yaml` in the output folder.
            out: output folder.
            options: further options of `marlaas run`, for example ["--seed", "1"].
        """
        run, given = cls(out), [str(one) for one in manifests if not isinstance(one, Kind)]
        run.folder.mkdir(parents=True, exist_ok=True)
        if objects := [one for one in manifests if isinstance(one, Kind)]:
            (run.folder / "manifests.yaml").write_text(to_yaml(*objects), encoding="utf-8")
            given.append(str(run.folder / "manifests.yaml"))
        command = [sys.executable, "-m", "marlaas", "run", *given, "--out", str(run.folder), *options]
        with run._output.open("wb") as output:
            # a session of its own: a Ctrl-C or an interrupt of a notebook is for the caller, and the run goes on
            run._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        return run

    @property
    def is_running(self) -> bool:
        """Whether the run goes on, whoever has started it."""
        if self._process is not None:
            return self._process.poll() is None
        return is_running(OutFolder(self.folder))

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for the end of the run that `start` has begun, and return its summary; of any other run, return it at once.

        Raises:
            RunFailed: a job did not succeed, or the input was refused.
            TimeoutError: the run goes on after `timeout_s` seconds.
        """
        if self._process is not None:
            try:
                code = self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"{self.folder}: the run goes on after {timeout_s:g} s") from None
            if code:
                raise RunFailed(code, self._output.read_text(encoding="utf-8", errors="replace")[-2000:].strip())
        return self.summary()

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        return asyncio.to_thread(self.wait).__await__()

    def stop(self) -> None:
        """Drain the run that `start` has begun, as Ctrl-C does, and wait for its end. `start` with the same folder continues it."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()

    def summary(self) -> dict[str, Any]:
        """Return the content of `summary.json`, by job. Raises InvalidInput before the run has written it."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))["jobs"]
        except FileNotFoundError:
            raise InvalidInput(f"{self.folder} has no summary.json: the run has not ended yet") from None
        return found

    def jobs(self) -> tuple[str, ...]:
        """Return the names of the jobs, as `namespace/name`."""
        return tuple(one.name for one in open_jobs(self.folder))

    def steps(self, job: str | None = None) -> Iterator[StepRecord]:
        """Yield the finished steps in order, and wait for further ones while the run goes on."""
        return self._follow(job, OpenedJob.steps)

    def evaluations(self, job: str | None = None) -> Iterator[EvalRecord]:
        """Yield the evaluations in order, as `steps`."""
        return self._follow(job, OpenedJob.evals)

    def episodes(self, job: str | None = None) -> Iterator[EpisodeRecord]:
        """Yield the stored episodes, oldest first."""
        return files.read(open_job(self.folder, job).folder)

    def adapter(self, job: str | None = None, agent: str | None = None) -> Path:
        """Return the folder of a job's adapter in PEFT format, which exists once the run has ended or stopped."""
        opened = open_job(self.folder, job)
        return opened.adapter_of(agent or opened.document.spec.agents[0].name)

    def rows(self, job: str | None = None) -> list[dict[str, Any]]:
        """Return the finished steps as flat mappings, for example for `pandas.DataFrame(run.rows())`."""
        return rows_of(open_job(self.folder, job).steps())

    @property
    def _output(self) -> Path:
        return self.folder / "output.log"

    def _follow(self, job: str | None, read: Callable[[OpenedJob], Sequence[T]]) -> Iterator[T]:
        num_seen = 0
        while True:
            is_last = not self.is_running
            found = read(open_job(self.folder, job)) if self._is_recorded or is_last else ()
            yield from found[num_seen:]
            num_seen = max(num_seen, len(found))
            if is_last:
                return
            time.sleep(POLL_S)

    @property
    def _is_recorded(self) -> bool:
        return (self.folder / ".state" / "run.json").is_file()


def to_yaml(*objects: Kind) -> str:
    """Return objects as a manifest, with the fields that were given."""
    dumped = [one.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True) for one in objects]
    return yaml.safe_dump_all(dumped, sort_keys=False)


def rows_of(steps: Iterable[StepRecord]) -> list[dict[str, Any]]:
    """Return steps as flat mappings."""
    return [_flat(step) for step in steps]


def _flat(step: StepRecord) -> dict[str, Any]:
    values = step.model_dump(
        mode="json", exclude={"metrics", "usage", "agents", "plays", "outcomes", "indices", "faults"}
    )
    return values | {f"metrics/{name}": value for name, value in step.metrics.items()}
