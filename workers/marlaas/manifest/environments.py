"""Check the environments of jobs and their arguments in a child process (`marlaas.environment_check`)."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from marlaas.envs import BUILTINS
from marlaas.manifest.findings import Finding, Placed
from marlaas_api.kinds import RLJob
from marlaas_api.kinds.problems import Loc, Problem

TIMEOUT_S = 120.0


def check_environments(jobs: Iterable[Placed[RLJob]], timeout_s: float = TIMEOUT_S) -> Iterator[Finding]:
    """Yield findings on the jobs' environments. A user's module is searched beside the manifest, then on PYTHONPATH."""
    named = [job for job in jobs if job.object.spec.environment.name is not None]
    for folder, together in groupby(sorted(named, key=_folder), key=_folder):
        batch = list(together)
        for job, complaint in zip(batch, _complaints(folder, batch, timeout_s), strict=False):
            if complaint is not None:
                yield job.source.finding(Problem(_where(job.object), complaint))


def _folder(job: Placed[RLJob]) -> Path:
    return job.source.folder


def _where(job: RLJob) -> Loc:
    """Return the most specific field that can be blamed."""
    name = str(job.spec.environment.name)
    if name in BUILTINS:
        return ("spec", "environment", "args")
    return ("spec", "environment") if ":" in name else ("spec", "environment", "name")


def _complaints(folder: Path, jobs: Sequence[Placed[RLJob]], timeout_s: float) -> list[str | None]:
    """Return one entry per job, in order. If a module ends the child, the list is shorter and its last entry reports that."""
    environments = [job.object.spec.environment for job in jobs]
    given = json.dumps([[environment.name, environment.args] for environment in environments])
    answers, end = _ask(folder, given, timeout_s)
    complaints: list[str | None] = [json.loads(answer) for answer in answers]
    if len(complaints) < len(jobs):
        complaints.append(f"environment '{environments[len(complaints)].name}': importing its module {end}")
    return complaints


def _ask(folder: Path, given: str, timeout_s: float) -> tuple[list[str], str]:
    """Return the child's answers, and how it ended."""
    path = os.pathsep.join([str(folder), str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.Popen(
        [sys.executable, "-m", "marlaas.environment_check"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
    )
    try:
        answers, complaints = child.communicate(given, timeout=timeout_s)
        end = f"ended the process (exit code {child.returncode}){_last_line(complaints)}"
    except subprocess.TimeoutExpired:
        child.kill()
        answers, _ = child.communicate()
        end = f"took longer than {timeout_s:g} s"
    return answers.splitlines(), end


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return f": {lines[-1]}" if lines else ""
