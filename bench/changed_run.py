"""`marlaas run` with changes that only a benchmark makes: `CHANGES=NAME,… python -m bench.changed_run run …`.

lockstep: a barrier over all jobs after each step; NUM_JOBS in the environment is the number of jobs that it waits for.
dropping: no step waits for slow groups, and those that become too stale are dropped.
first-come: requests enter the engines in the order of their arrival, whatever the weights.
monitored: the NATS server has a monitoring endpoint.
store: the blobs are in the store of the URL in BLOBS, not in the output folder.

Each process imports only its own role, so that memory is that of `marlaas run`.
"""

import os
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

NAMES = ("lockstep", "dropping", "first-come", "monitored", "store")
VARIABLE = "CHANGES"
STORE = "BLOBS"
_COMMAND = (sys.executable, "-P", "-m", "bench.changed_run")


def barrier() -> None:
    """Let jobs of this process issue groups of a step only when every job has finished the steps before."""
    from marlaas_worker.orchestrator.job_state import JobState
    from marlaas_worker.orchestrator.owned_job import OwnedJob

    want, finished = OwnedJob._want, dict[str, int]()

    def want_in_step(job: OwnedJob, state: JobState) -> int:
        drafts = state.assembly.drafts
        step = drafts[0].step if drafts else sys.maxsize
        finished[job.document.uid] = step
        if len(finished) < int(os.environ["NUM_JOBS"]) or step > min(finished.values()):
            return 0
        return want(job, state)

    _set(OwnedJob, "_want", want_in_step)


def dropping() -> None:
    """Assign groups of this process's jobs to steps as before pacing."""
    from bench.staleness import Dropping
    from marlaas_worker.orchestrator import job_state

    _set(job_state, "Assembly", Dropping)


def first_come() -> None:
    """Charge all requests of this process's engines to one account, whose queue is in the order of arrival."""
    from marlaas_worker.rollout.request_limiter import Account, RequestLimiter

    everybody = Account("all", 1.0, "all")

    def of_all(place: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(place)
        def replaced(limiter: RequestLimiter, account: Account, *rest: Any) -> Any:
            return place(limiter, everybody, *rest)

        return replaced

    for name in ("place", "alone"):
        _set(RequestLimiter, name, of_all(getattr(RequestLimiter, name)))


def monitored() -> None:
    """Have the server of this process's run listen for monitoring, on a port that it chooses."""
    from marlaas.local import server
    from marlaas_api.bus_users import server_config

    _set(server, "server_config", lambda keys: f'{server_config(keys)}\nhttp: "127.0.0.1:-1"\n')


def store() -> None:
    """Have this process open the store of the URL in BLOBS, whichever it is told. Modules that are imported later see this."""
    from marlaas_api import blobs_store

    open_blobs = blobs_store.open_blobs
    _set(blobs_store, "open_blobs", lambda _: open_blobs(os.environ[STORE]))


def changes_of(words: list[str], names: list[str]) -> list[Callable[[], None]]:
    """Return the changes of a process. words: its arguments. names: the changes of the run."""
    wanted = {
        "run": {"monitored": monitored},
        "orchestrator": {"lockstep": barrier, "dropping": dropping},
        "rollout": {"first-come": first_come},
    }
    return [change for name, change in ({"store": store} | wanted.get(words[0], {})).items() if name in names]


def _set(owner: Any, name: str, value: object) -> None:
    setattr(owner, name, value)


def main() -> None:
    words = sys.argv[1:]
    for change in changes_of(words, os.environ.get(VARIABLE, "").split(",")):
        change()
    if words[0] == "run":
        from marlaas.cli import main as marlaas_main
        from marlaas.cli import run as run_command
        from marlaas.local import processes
        from marlaas.local.runner import RunRequest

        _set(processes, "ROLE_COMMAND", _COMMAND)  # otherwise each sandbox would be a process of its own
        _set(run_command, "RunRequest", partial(RunRequest, role_command=_COMMAND))
        marlaas_main()
    else:
        from marlaas_worker.__main__ import main as worker_main

        sys.exit(worker_main())


if __name__ == "__main__":
    main()
