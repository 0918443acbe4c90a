"""Reads the totals that rollout roles log at their end: loads of adapter versions, requests that vLLM preempted, and batches without room."""

import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

_COUNTS = re.compile(
    r"the engine preempted (\d+) of (\d+) requests; (\d+) of (\d+) batches had no room for all requests"
)
_LOADS = re.compile(
    r"(\d+) loads of adapter versions took ([\d.]+) s of the engine's time; (\d+) of them were re-loads, which took ([\d.]+) s"
)
_START = "=== start "


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """Totals of engines. The names are those of `EngineCounts` and `ReloadPace`; the order is that of their sentences."""

    preemptions: float
    requests: float
    queued_steps: float
    steps: float
    num_loads: float
    load_s: float
    num_reloads: float
    reload_s: float


def read_totals(logs: Path) -> EngineTotals | None:
    """Return the totals of all replicas whose logs lie in a folder; None if one of them does not tell them."""
    found = [totals_in(path.read_text()) for path in logs.glob("rollout-*.log")]
    return total(one for one in found if one is not None) if found and None not in found else None


def totals_in(log: str) -> EngineTotals | None:
    """Return the totals that a role's log tells; None if the role, or one that was started before it, ended without."""
    pairs = zip(_COUNTS.findall(log), _LOADS.findall(log), strict=False)
    found = [EngineTotals(*map(float, [*counts, *loads])) for counts, loads in pairs]
    return total(found) if len(found) == log.count(_START) > 0 else None


def total(parts: Iterable[EngineTotals]) -> EngineTotals:
    """Return the sum of totals."""
    return EngineTotals(*(sum(column) for column in zip(*map(astuple, parts), strict=True)))
