"""Status line above the table: what the run waits for. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from marlaas.local.plan import ProcessSpec
from marlaas.local.table import JobView, duration
from marlaas_api.messages import Phase

_STARTING = {
    "orchestrator": "starting the orchestrator",
    "rollout": "starting the engine of {name}; the first time takes about a minute",
    "trainer": "loading the base model into {name}",
    "sandbox": "starting {name}",
}


@dataclass(frozen=True, slots=True)
class ProcessState:
    """State of a role process. `started_at` is None between two runs of it.

    `last_words` holds the reason of the last exit; `restarts` counts consecutive bad runs.
    """

    spec: ProcessSpec
    started_at: float | None
    ready: bool
    restarts: int = 0
    last_words: str = ""
    next_start_at: float = 0.0


def status_line(processes: Sequence[ProcessState], views: Sequence[JobView], now: float) -> str:
    """Return a text for the first process that has exited, else for those that start, else for the jobs."""
    for state in processes:
        if state.started_at is None:
            return _death(state, now)
    starting = [state for state in processes if not state.ready and state.started_at is not None]
    if starting:
        return "; ".join(_start(state, now) for state in starting)
    return _jobs(views)


def _death(state: ProcessState, now: float) -> str:
    wait = duration(max(0.0, state.next_start_at - now))
    return f"{state.spec} died: {state.last_words}; it starts again in {wait} (death {state.restarts} in a row)"


def _start(state: ProcessState, now: float) -> str:
    text = _STARTING.get(state.spec.role, "starting {name}").format(name=str(state.spec))
    return f"{text} ({duration(now - (state.started_at or now))})"


def _jobs(views: Sequence[JobView]) -> str:
    queued = [view for view in views if view.progress is not None and view.progress.phase is Phase.QUEUED]
    if queued and queued[0].progress is not None:
        return f"{queued[0].name} is queued: {queued[0].progress.message or queued[0].progress.reason}"
    first = [view for view in views if view.progress is not None and not view.progress.phase.final]
    if any(view.progress is not None and view.progress.step == 0 for view in first):
        return "everything is up; evaluating version 0 and playing the first episodes"
    return "training" if first else "finishing"
