"""Shares of the engines over time: received and entitled, by tenant, from recorded turns. Pure.

The cost of a turn is what the engines' fair queue charges: uncached prompt tokens and generated tokens, here spread evenly over
the turn's time in the engine. A tenant is active while one of its episodes is open: from the first request of the
episode to the end of its last turn, tools included. It is then entitled to its weight divided by the weights of all
active tenants.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from marlaas.episodes.record import EpisodeRecord, TurnRecord
from marlaas.plots.series import Interval, union

_MAX_WINDOWS = 60
_MIN_WINDOW_S = 5.0


@dataclass(frozen=True, slots=True)
class TenantService:
    """Cost and time of a tenant's turns, and the time in which it was active."""

    tenant: str
    weight: float
    turns: tuple[tuple[Interval, int], ...]
    active: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class TenantShares:
    """Shares of a tenant, one per window; NaN where the engines served nobody.

    Attributes:
        begin: unix seconds of the first window's begin. window_s: length of each window.
        received: share of the tokens. entitled: mean share over the window by weight among the active tenants; 0
            while the tenant is not active.
        received_all, entitled_all: over the whole run; each window's entitled share counts by the tokens of the window.
    """

    tenant: str
    weight: float
    begin: float
    window_s: float
    received: tuple[float, ...]
    entitled: tuple[float, ...]
    received_all: float
    entitled_all: float


def service(tenant: str, weight: float, episodes: Iterable[EpisodeRecord]) -> TenantService:
    """Return the service of a tenant. episodes: recorded ones of one of its jobs, or of several."""
    records = [record for record in episodes if record.turns]
    turns = [(_in_engine(turn), _cost(turn)) for record in records for turn in record.turns]
    opened = ((min(one.at - one.engine_s - one.queue_s for one in record.turns), record.at) for record in records)
    return TenantService(tenant, weight, tuple(turns), union(opened))


@dataclass(frozen=True, slots=True)
class _Windows:
    """Windows of equal length. A time outside belongs to the first or the last one."""

    begin: float
    window_s: float
    num: int

    def at(self, time: float) -> int:
        return min(self.num - 1, max(0, int((time - self.begin) / self.window_s)))

    def bounds(self, number: int) -> Interval:
        return self.begin + number * self.window_s, self.begin + (number + 1) * self.window_s


def shares(services: Iterable[TenantService]) -> tuple[TenantShares, ...]:
    """Return the shares of tenants that use the same engines, by name; empty if fewer than two of them have turns.

    services: one or more of each tenant.
    """
    served = _by_tenant(one for one in services if one.active)
    if len(served) < 2:
        return ()
    begin = min(one.active[0][0] for one in served)
    length_s = max(one.active[-1][1] for one in served) - begin
    num = min(_MAX_WINDOWS, max(1, int(length_s / _MIN_WINDOW_S)))
    windows = _Windows(begin, length_s / num, num)
    entitled = _entitled(served, windows)
    tokens = [_tokens(one.turns, windows) for one in served]
    sums = [sum(column) for column in zip(*tokens, strict=True)]
    return tuple(
        _of_tenant(one, windows, mine, entitled[one.tenant], sums) for one, mine in zip(served, tokens, strict=True)
    )


def _by_tenant(services: Iterable[TenantService]) -> list[TenantService]:
    found: dict[str, TenantService] = {}
    for one in services:
        before = found.get(one.tenant, TenantService(one.tenant, one.weight, (), ()))
        active = union([*before.active, *one.active])
        found[one.tenant] = TenantService(one.tenant, one.weight, before.turns + one.turns, active)
    return [found[tenant] for tenant in sorted(found)]


def _of_tenant(
    one: TenantService, windows: _Windows, mine: Sequence[float], entitled: Sequence[float], sums: Sequence[float]
) -> TenantShares:
    whole = sum(sums)
    return TenantShares(
        one.tenant,
        one.weight,
        windows.begin,
        windows.window_s,
        tuple(part / tokens if tokens else math.nan for part, tokens in zip(mine, sums, strict=True)),
        tuple(entitled),
        sum(mine) / whole if whole else math.nan,
        sum(share * tokens for share, tokens in zip(entitled, sums, strict=True)) / whole if whole else math.nan,
    )


def _in_engine(turn: TurnRecord) -> Interval:
    return turn.at - turn.engine_s, turn.at


def _cost(turn: TurnRecord) -> int:
    return max(0, turn.num_prompt_tokens - turn.num_cached_tokens) + len(turn.output_ids)


def _tokens(turns: Iterable[tuple[Interval, int]], windows: _Windows) -> list[float]:
    """Return the tokens of each window. A turn without length counts in the window of its end."""
    found = [0.0] * windows.num
    for (start, end), cost in turns:
        first, last = windows.at(start), windows.at(end)
        for number in range(first, last + 1):
            low, high = windows.bounds(number)
            inside = (min(end, high) - max(start, low)) / (end - start) if last > first else 1.0
            found[number] += cost * inside
    return found


def _entitled(served: Sequence[TenantService], windows: _Windows) -> Mapping[str, list[float]]:
    """Return each tenant's mean entitled share of each window."""
    changes: dict[float, list[tuple[str, float]]] = defaultdict(list)
    for one in served:
        for start, end in one.active:
            changes[start].append((one.tenant, one.weight))
            changes[end].append((one.tenant, 0.0))
    for number in range(windows.num + 1):
        changes[windows.bounds(number)[0]] += []
    found = {one.tenant: [0.0] * windows.num for one in served}
    weight_of: dict[str, float] = {}
    for start, end in pairwise(sorted(changes)):
        weight_of |= dict(changes[start])
        weights = sum(weight_of.values())
        number = windows.at((start + end) / 2)
        for tenant, weight in weight_of.items() if weights else ():
            found[tenant][number] += weight / weights * (end - start) / windows.window_s
    return found
