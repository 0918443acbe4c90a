"""Mode C of `bench multitenant`: all jobs in lock-step. The next step of any job begins when all jobs have finished theirs.

`python -m bench.multitenant_lockstep run …` is `marlaas run` whose orchestrator has this barrier. NUM_JOBS in the
environment is the number of jobs that the barrier waits for.
"""

import os
import sys
from functools import partial

from marlaas.cli import main as marlaas_main
from marlaas.cli import run as run_command
from marlaas.local.runner import RunRequest
from marlaas_worker.__main__ import main as worker_main
from marlaas_worker.orchestrator.job_state import JobState
from marlaas_worker.orchestrator.owned_job import OwnedJob

_finished: dict[str, int] = {}


def barrier() -> None:
    """Let jobs of this process issue groups of a step only when every job has finished the steps before."""
    want = OwnedJob._want

    def want_in_step(job: OwnedJob, state: JobState) -> int:
        drafts = state.assembly.drafts
        step = drafts[0].step if drafts else sys.maxsize
        _finished[job.document.uid] = step
        if len(_finished) < int(os.environ["NUM_JOBS"]) or step > min(_finished.values()):
            return 0
        return want(job, state)

    setattr(OwnedJob, "_want", want_in_step)  # noqa: B010 (a plain assignment to a method does not pass mypy)


def main() -> None:
    if sys.argv[1] == "run":
        command = (sys.executable, "-m", "bench.multitenant_lockstep")
        setattr(run_command, "RunRequest", partial(RunRequest, role_command=command))  # noqa: B010
        marlaas_main()
    else:
        if sys.argv[1] == "orchestrator":
            barrier()
        worker_main()


if __name__ == "__main__":
    main()
