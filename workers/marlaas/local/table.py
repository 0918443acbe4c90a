"""The live table's rows, and the status line above it, made from progress. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marlaas.local.plan import ProcessSpec
from marlaas_api.last_words import visible
from marlaas_api.messages import AgentProgress, JobDocument, Phase, Progress, UsageAmounts
from marlaas_api.reasons import Reason

COLUMNS = ("JOB", "PHASE", "STEP", "VERSION", "REWARD", "EVAL", "TOK/S", "STALENESS", "FAULTS", "ETA")
COLUMNS_OF_MANY = {
    "TENANT / JOB": 0,
    "SHARE (BY WEIGHT)": 0,
    "STEP": 0,
    "REWARD": 98,
    "EVAL": 110,
    "TOK/S": 0,
    "TOKENS": 0,
    "TRAINED": 0,
    "WASTED": 0,
    "FAULTS": 118,
    "ETA": 88,
}
"""Columns of a table that is grouped by tenant, and the width of the terminal from which each is shown."""
_UNDERWAY = frozenset({Reason.ADMITTED, Reason.WAITING_FOR_TRAINER, Reason.TRAINING, Reason.EVALUATING})
"""Reasons of a running job that waits for nothing unusual."""


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as displayed.

    progress: None until the orchestrator publishes it. is_weight_known: whether the document has its tenant's weight.
    """

    document: JobDocument
    progress: Progress | None = None
    eta_s: float | None = None
    is_weight_known: bool = True

    @property
    def name(self) -> str:
        """Name as `<namespace>/<name>`."""
        return str(self.document.ref)


def cells(view: JobView) -> tuple[str, ...]:
    """Return one cell per column."""
    progress = view.progress
    steps = view.document.spec.training.steps
    if progress is None:
        return (view.name, "Starting", f"0/{steps}", *["·"] * (len(COLUMNS) - 3))
    return (
        view.name,
        progress.phase.value,
        f"{progress.step}/{steps}",
        _version(view.document, progress),
        number(progress.reward),
        evaluation(progress),
        f"{progress.tokens_per_s:,.0f}",
        f"{progress.staleness:.2f}",
        faults(progress.faults),
        "·" if progress.phase.final else duration(view.eta_s),
    )


def _version(document: JobDocument, progress: Progress) -> str:
    """Return `7`, or `12/11` for several policies, in the order of the manifest."""
    newest = [progress.versions.get(agent.name, -1) for agent in document.spec.policies]
    return "/".join("·" if version < 0 else str(version) for version in newest)


def agent_cells(view: JobView) -> list[tuple[str, ...]]:
    """Return a line for each agent, with a cell per column; none if the job has one agent, or no progress."""
    progress = view.progress
    if progress is None or len(progress.agents) < 2:
        return []
    policies = {agent.name: agent.policy_name for agent in view.document.spec.agents}
    return [
        (
            f"  {name}",
            "",
            "",
            str(progress.versions.get(policies.get(name, name), "·")),
            number(agent.reward),
            evaluation(agent),
            "",
            f"{agent.staleness:.2f}",
            "",
            "",
        )
        for name, agent in progress.agents.items()
    ]


def cells_of_many(view: JobView) -> tuple[str, ...]:
    """Return one cell per column of `COLUMNS_OF_MANY`; the second one has the phase."""
    name, phase, step, _, reward, score, speed, _, fault, eta = cells(view)
    tokens = token_cells(view.progress.amounts) if view.progress is not None else ("·", "·", "·")
    return name, phase, step, reward, score, speed, *tokens, fault, eta


def plain_line(view: JobView) -> str:
    """Return one line for logs and outputs that are not terminals."""
    progress = view.progress
    if progress is None:
        return f"{view.name}: starting"
    _, phase, step, version, reward, score, speed, staleness, fault, eta = cells(view)
    metrics = f"step {step}, version {version}, reward {reward}, eval {score}, {speed} tok/s, staleness {staleness}"
    tail = "" if progress.phase.final else f", done in {eta}" if view.eta_s is not None else ""
    tells = progress.message and (_is_delayed(progress) or progress.phase not in ("Running", "Succeeded"))
    why = f" · {_reason(progress)}" if tells else ""
    agents = "".join(f"; {_plain_agent(line)}" for line in agent_cells(view))
    return f"{view.name}: {phase}, {metrics}, faults {fault}{tail}{agents}{why}"


def _is_delayed(progress: Progress) -> bool:
    """Return whether a running job waits, for example for the blob store."""
    return progress.phase is Phase.RUNNING and progress.reason not in _UNDERWAY


def _reason(progress: Progress) -> str:
    return f"{progress.reason}: {visible(progress.message)}"


def _plain_agent(line: Sequence[str]) -> str:
    name, _, _, version, reward, score, _, staleness, _, _ = line
    return f"{name.strip()}: version {version}, reward {reward}, eval {score}, staleness {staleness}"


def as_json(view: JobView) -> dict[str, object]:
    """Return the whole progress for JSON output; keys as in `summary.json`."""
    progress = view.progress
    if progress is None:
        waiting = {"phase": Phase.QUEUED.value, "message": "the orchestrator has not seen the job yet"}
        return {"job": view.name, **waiting, "steps": view.document.spec.training.steps}
    return {
        "job": view.name,
        "phase": progress.phase.value,
        "reason": progress.reason,
        "message": progress.message,
        "step": progress.step,
        "steps": progress.steps,
        "versions": dict(progress.versions),
        **_agents_as_json(progress),
        "reward": finite(progress.reward),
        "evalBefore": finite(progress.eval_before),
        "evalLast": finite(progress.eval_last),
        "tokens": progress.tokens,
        "tokensPerSecond": round(progress.tokens_per_s, 1),
        "staleness": progress.staleness,
        "faults": dict(progress.faults),
        "warnings": dict(progress.warnings),
        "trainingFaults": dict(progress.training_faults),
        "etaSeconds": None if view.eta_s is None else round(view.eta_s),
        "at": progress.at,
    }


def _agents_as_json(progress: Progress) -> dict[str, object]:
    if len(progress.agents) < 2:
        return {}
    return {
        "agents": {
            name: {
                "reward": finite(agent.reward),
                "evalBefore": finite(agent.eval_before),
                "evalLast": finite(agent.eval_last),
                "staleness": agent.staleness,
            }
            for name, agent in progress.agents.items()
        }
    }


def why(name: str, reason: str, message: str, max_lines: int) -> str:
    """Return a job's failure in a few lines; of a longer message, such as a traceback, the last ones. Control characters are escaped."""
    lines = visible(message).strip().splitlines()
    kept = [f"  {line}" for line in ["…", *lines[-max_lines:]]] if len(lines) > max_lines else lines
    return "\n".join([f"{name}: {reason}: {kept[0].strip() if kept else ''}", *kept[1:]])


def versions(by_agent: Mapping[str, int]) -> str:
    """Return `7`, or `solver 7, critic 3` for several agents."""
    if len(by_agent) <= 1:
        return next((str(version) for version in by_agent.values() if version >= 0), "·")
    return ", ".join(f"{agent} {version}" for agent, version in sorted(by_agent.items()))


def evaluation(progress: Progress | AgentProgress) -> str:
    """Return evaluations as `0.31 → 0.87`."""
    if progress.eval_last is None or progress.eval_last == progress.eval_before:
        return number(progress.eval_before)
    return f"{number(progress.eval_before)} → {number(progress.eval_last)}"


def faults(by_class: Mapping[str, int]) -> str:
    """Return faults as `env 3, infra 1`."""
    return ", ".join(f"{name} {count}" for name, count in sorted(by_class.items()) if count) or "0"


def token_cells(amounts: UsageAmounts) -> tuple[str, str, str]:
    """Return the generated tokens, and the shares of them that were trained and wasted; the rest is evaluated or open."""
    generated = amounts.generated_tokens
    return amount(generated), percent(amounts.trained_tokens, generated), percent(amounts.wasted_tokens, generated)


def percent(part: float, whole: float) -> str:
    """Return `62%`; a dot if the whole is 0."""
    return f"{part / whole:.0%}" if whole else "·"


def amount(value: float) -> str:
    """Return a number with three digits: `950`, `79.1k`, `1.20M`."""
    for unit in ("", "k", "M", "G"):
        if value < 999.5 or unit == "G":
            break
        value /= 1000
    return f"{value:.0f}{unit}" if value >= 100 or not unit else f"{value:.{1 if value >= 10 else 2}f}{unit}"


def number(value: float | None) -> str:
    """Return the number with two decimals; a dot for None and NaN."""
    return "·" if finite(value) is None else f"{value:.2f}"


def finite(value: float | None) -> float | None:
    """Return None for NaN (the mean of no values), which JSON lacks."""
    return None if value is None or math.isnan(value) else value


def sentence(text: str) -> str:
    """Return the last line of `text`, with a full stop if it has no closing punctuation."""
    last = text.strip().splitlines()[-1] if text.strip() else ""
    return last if last.endswith((".", "!", "?")) else f"{last}."


def duration(seconds: float | None) -> str:
    """Return `42 s`, `3 m 20 s` or `1 h 05 m`; a dot for None."""
    if seconds is None:
        return "·"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} m"


_STARTING = {
    "orchestrator": "starting the orchestrator",
    "rollout": "starting the engine of {name}; the first time takes about a minute",
    "trainer": "loading the base model into {name}",
    "sandbox": "starting {name}",
}


@dataclass(frozen=True, slots=True)
class ProcessState:
    """State of a role process. `started_at` is None between two runs of it.

    `last_words` holds the reason of the last exit; `restarts` counts consecutive bad runs. `last_line` of its log, if its start takes long.
    """

    spec: ProcessSpec
    started_at: float | None
    ready: bool
    restarts: int = 0
    last_words: str = ""
    next_start_at: float = 0.0
    last_line: str = ""


def status_line(processes: Sequence[ProcessState], views: Sequence[JobView], now: float) -> str:
    """Return a text for the first process that has exited, else for those that start, else for the jobs."""
    for state in processes:
        if state.started_at is None:
            return _exited(state, now)
    starting = [state for state in processes if not state.ready and state.started_at is not None]
    if starting:
        return "; ".join(_start(state, now) for state in starting)
    return _jobs(views)


def _exited(state: ProcessState, now: float) -> str:
    wait = duration(max(0.0, state.next_start_at - now))
    return f"{state.spec} exited: {state.last_words}; it restarts in {wait} (exit {state.restarts} in a row)"


def _start(state: ProcessState, now: float) -> str:
    text = _STARTING.get(state.spec.role, "starting {name}").format(name=str(state.spec))
    said = f"; its log: {state.last_line}" if state.last_line else ""
    return f"{text} ({duration(now - (state.started_at or now))}{said})"


def _jobs(views: Sequence[JobView]) -> str:
    for view in views:
        if view.progress is not None and _is_delayed(view.progress):
            return f"{view.name} waits: {_reason(view.progress)}"
    queued = [view for view in views if view.progress is not None and view.progress.phase is Phase.QUEUED]
    if queued and queued[0].progress is not None:
        return f"{queued[0].name} is queued: {queued[0].progress.message or queued[0].progress.reason}"
    first = [view for view in views if view.progress is not None and not view.progress.phase.final]
    if any(view.progress is not None and view.progress.step == 0 for view in first):
        return "all roles are ready; evaluating version 0 and playing the first episodes"
    return "training" if first else "finishing"
