"""Tables of `bench multitenant`. A figure of several rounds is the median, with the least and the largest in parentheses. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from bench import multitenant_figures as figures
from bench.multitenant_engine import EngineTotals
from bench.multitenant_figures import Events
from bench.multitenant_workload import Mode, Workload, name_of
from bench.rounds import ratios, spread
from bench.runs import table

Found = Mapping[Mode, Sequence[Events]]
"""Events of a workload: by mode, those of each round."""


@dataclass(frozen=True, slots=True)
class Outline:
    """What the tables and pictures of all workloads need of a run: steps/s, and memory by role while jobs run and in the whole run."""

    rate: float
    memory: Mapping[str, int]
    peak: Mapping[str, int]


Outlines = Mapping[Mode, Sequence[Outline]]
RATES = ["jobs", "tools", "mode", "steps/s", "× A"]
RATES += ["min(jobs × B, cores / CPU of A)", "share", "cores / own CPU", "share"]
RATES += ["first result p50 / max", "engine busy", "batch"]
ENGINES = ["mode", "command to first turn, s", "loads / re-loads", "re-loads, share of the time", "of its busy time"]
ENGINES += ["turns that wait for it, mean", "preempted by vLLM", "batches without room"]
BASES = ("A-strict", "C-strict", "O-strict-one-by-one", "O-strict-together")
ROLES = ("sandbox", "rollout", "trainer", "nats-server", "orchestrator", "runner", "curves")


def rates(workload: Workload, found: Found, cores: int) -> str:
    """Return the table of rates. Each round's figures are compared with A and B of the same round."""
    own = {mode: [rate_of(mode, events) for events in rounds] for mode, rounds in found.items()}
    bases = {mode.letter: mode for mode in found if mode.letter in "AB"}
    rows = []
    for mode, rounds in found.items():
        rows.append(
            [
                workload.num_jobs,
                f"{workload.wait_s:g} s",
                name_of(mode),
                spread(own[mode]),
                spread(ratios(own[mode], own[bases["A"]])) if "A" in bases else "",
                *_share(own[mode], _bounds_of_others(workload, found, bases, cores) if mode.together else []),
                *_share(own[mode], [figures.cpu_bound(one, cores) for one in rounds] if mode.together else []),
                _first_results(rounds) if mode.together else "",
                spread([figures.busy_share(one) for one in rounds], ".0%"),
                spread([figures.occupancy(one) for one in rounds], ".1f"),
            ]
        )
    return table(RATES, rows)


def rate_of(mode: Mode, events: Events) -> float:
    """Return a mode's steps per second."""
    return figures.rate_together(events) if mode.together else figures.rate_one_by_one(events)


def _bounds_of_others(workload: Workload, found: Found, bases: Mapping[str, Mode], cores: int) -> list[float]:
    if set(bases) != {"A", "B"}:
        return []
    pairs = zip(found[bases["A"]], found[bases["B"]], strict=True)
    return [
        figures.bound_of_others(alone, workload.num_jobs, figures.rate_one_by_one(one), cores) for alone, one in pairs
    ]


def _share(own: Sequence[float], bounds: Sequence[float]) -> list[str]:
    return [spread(bounds), spread(ratios(own, bounds), ".0%")] if bounds else ["", ""]


def _first_results(rounds: Sequence[Events]) -> str:
    firsts = [figures.first_results_s(one) for one in rounds]
    return f"{median(figures.percentile(one, 0.5) for one in firsts):.1f} / {median(one[-1] for one in firsts):.1f} s"


def costs(found: Found) -> str:
    """Return the table of processor time by role, of an episode and of a turn: an episode's depends on its number of turns."""
    rows = []
    for mode, rounds in found.items():
        spent = [(figures.cpu_s(one), figures.num_episodes(one), figures.num_turns(one)) for one in rounds]
        cells = [_cost(spent, _of_role(role)) for role in ROLES]
        start = sum(median(figures.start_cpu_s(one).get(role, 0.0) for one in rounds) for role in ROLES)
        turns = median(num_turns / num_episodes for _, num_episodes, num_turns in spent)
        all_roles = _cost(spent, lambda seconds: sum(seconds.values()))
        rows.append([name_of(mode), *cells, all_roles, f"{turns:.2f}", f"{start:.0f}"])
    head = ["mode", *ROLES, "all", "turns of an episode", "CPU s before the first turn"]
    return "CPU ms of an episode / of a turn\n\n" + table(head, rows)


def engines(found: Found) -> str:
    """Return the table of the engine's start, its loads of adapters and its queues. Cells of runs that do not tell it are empty."""
    rows = []
    for mode, rounds in found.items():
        starts = [seconds for events in rounds if (seconds := figures.start_s(events)) is not None]
        shares = [pair for events in rounds if (pair := figures.reload_shares(events)) is not None]
        totals = [events.engine for events in rounds if events.engine is not None]
        rows.append(
            [
                name_of(mode),
                spread(starts, ".1f") if starts else "",
                *_loads(totals, shares),
                spread([figures.num_queued(events) for events in rounds], ".1f"),
                *_vllm(totals),
            ]
        )
    return table(ENGINES, rows)


def _loads(totals: Sequence[EngineTotals], shares: Sequence[tuple[float, float]]) -> list[str]:
    if not totals:
        return ["", "", ""]
    numbers = [f"{median(getattr(one, what) for one in totals):.0f}" for what in ("num_loads", "num_reloads")]
    return [" / ".join(numbers), *(spread(one, ".2%") for one in zip(*shares, strict=True))]


def _vllm(totals: Sequence[EngineTotals]) -> list[str]:
    """Return the shares of requests that were preempted, and of batches without room for all requests."""
    if not totals:
        return ["", ""]
    preempted = spread([one.preemptions / max(1, one.requests) for one in totals], ".2%")
    return [preempted, spread([one.queued_steps / max(1, one.steps) for one in totals], ".0%")]


def _of_role(role: str) -> Callable[[Mapping[str, float]], float]:
    return lambda seconds: seconds.get(role, 0.0)


def _cost(spent: Sequence[tuple[Mapping[str, float], int, int]], part: Callable[[Mapping[str, float]], float]) -> str:
    episode = median(1000 * part(seconds) / num_episodes for seconds, num_episodes, _ in spent)
    turn = median(1000 * part(seconds) / num_turns for seconds, _, num_turns in spent)
    return f"{episode:.1f} / {turn:.1f}"


def outlines(found: Found) -> Outlines:
    """Return what is needed of a workload's runs after its tables are printed."""
    return {
        mode: [Outline(rate_of(mode, one), figures.memory_bytes(one), figures.peak_memory_bytes(one)) for one in rounds]
        for mode, rounds in found.items()
    }


def comparisons(found: Mapping[Workload, Outlines]) -> str:
    """Return the table of mode D's rate against other modes, and against the first number of jobs; paired by round."""
    rows = []
    for workload, modes in found.items():
        few = next(other for other in found if replace(other, num_jobs=workload.num_jobs) == workload)
        for mode in (one for one in modes if one.letter == "D"):
            own = _rates(modes, name_of(mode))
            bases = [_rates(modes, name) for name in BASES]
            if few != workload:
                bases.append(_rates(found[few], name_of(mode)))
            cells = [spread(ratios(own, base)) if base else "" for base in bases]
            rows.append([workload.num_jobs, f"{workload.wait_s:g} s", name_of(mode), *cells, *[""] * (few == workload)])
    first = next(iter(found)).num_jobs
    return table(["jobs", "tools", "mode", *(f"× {name}" for name in BASES), f"× {_jobs(first)}"], rows)


def _rates(modes: Outlines, name: str) -> list[float]:
    return [one.rate for mode, rounds in modes.items() if name_of(mode) == name for one in rounds]


def memory(found: Mapping[Workload, Outlines]) -> str:
    """Return the table of memory: for each mode whose jobs run together, a row for each role, a column for each number of jobs.

    Only the first of the workloads with a number of jobs counts. In parentheses: the peak of the whole run. `all` is the sum of
    the roles' peaks.
    """
    by_jobs: dict[int, Outlines] = {}
    for workload, modes in found.items():
        by_jobs.setdefault(workload.num_jobs, modes)
    together = dict.fromkeys(mode for modes in by_jobs.values() for mode in modes if mode.together and not mode.before)
    rows = [
        [name_of(mode), role, *(_memory(modes.get(mode, ()), role) for modes in by_jobs.values())]
        for mode in together
        for role in (*ROLES, "all")
    ]
    head = ["mode", "role", *map(_jobs, by_jobs)]
    return "peak MiB while jobs run (of the whole run)\n\n" + table(head, rows)


def _jobs(number: int) -> str:
    return f"{number} job{'s' if number > 1 else ''}"


def _memory(rounds: Sequence[Outline], role: str) -> str:
    if not rounds:
        return ""
    inside, whole = (median(_size(getattr(one, what), role) for one in rounds) for what in ("memory", "peak"))
    return f"{inside / 2**20:.0f} ({whole / 2**20:.0f})"


def _size(sizes: Mapping[str, int], role: str) -> int:
    return sum(sizes.values()) if role == "all" else sizes.get(role, 0)
