"""Jobs that share fewer slots than they need, in simulated time: the product's rule for slots against others.

Jobs of 8 episodes a step, 3 turns of 0.3 s on average with tools between; 64 requests run at a time; a trainer takes 0.1 s for
a step, that of the tenant with the fewest steps first; during a load of `--load-s` the engine generates nothing.
- `present`: `rollout.paging`.
- `full price`: the same, but re-loads of an engine that runs few requests are limited as those of a full one.
- `quantum`: every version that is not superseded keeps its slot for the mean time of a load / 2 %, and nothing else counts. So re-loads
  take at most 2 % of the time *of one slot*.
- `quantum of all`: the same for that time times the number of slots, 30 s at most.
Printed are the steps per second of all jobs, those of a tenant that has one job beside one with a hundred, the share of the engine's
time that re-loads take while requests run, and the seconds from a version's commit to its first token.
"""

import argparse
import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bench import options
from bench.runs import print_table
from marlaas_worker.rollout.paging import RECENT_S, PageDemand, PagePlan, Resident, Urgency, plan_pages
from marlaas_worker.rollout.reload_pace import MAX_RELOAD_SHARE, MIN_QUANTUM_S, ReloadPace

EPISODES, TURNS, PLACES = 8, 3, 64
TURN_S, TRAINER_S = 0.3, 0.1
FULL_SPEED = 16
"""Requests that run at full speed at the same time."""
LONGEST_QUANTUM_S = 30.0
IN_USE_S = 60.0


class Rule(Protocol):
    """A rule for slots."""

    def plan(
        self, num_slots: int, residents: Sequence[Resident], demands: Sequence[PageDemand], now: float
    ) -> PagePlan:
        """Return the versions to load, to evict and to give no new requests. Args as `plan_pages`."""
        ...

    def loaded(self, name: str, seconds: float, now: float, is_reload: bool, num_running: int) -> None:
        """Record a load. num_running: requests that ran at its begin."""
        ...


class Present:
    """The product's rule. num_places: of the engine; with 1, each re-load costs what it costs a full engine."""

    def __init__(self, num_places: int) -> None:
        self._pace = ReloadPace(num_places)

    def plan(
        self, num_slots: int, residents: Sequence[Resident], demands: Sequence[PageDemand], now: float
    ) -> PagePlan:
        found = plan_pages(num_slots, residents, demands, self._pace, now)
        for name in found.expected:
            self._pace.expect(name, now)
        return found

    def loaded(self, name: str, seconds: float, now: float, is_reload: bool, num_running: int) -> None:
        self._pace.add_load(name, seconds, now, is_reload=is_reload, busy=self._pace.busy(num_running))


class Quantum:
    """Every version that is not superseded keeps its slot for a quantum, and after that if nothing waits. scale: of the quantum."""

    def __init__(self, scale: int) -> None:
        self._scale = scale
        self._total_s, self._num = 0.0, 0

    def loaded(self, name: str, seconds: float, now: float, is_reload: bool, num_running: int) -> None:
        self._total_s, self._num = self._total_s + seconds, self._num + 1

    def plan(
        self, num_slots: int, residents: Sequence[Resident], demands: Sequence[PageDemand], now: float
    ) -> PagePlan:
        mean_s = self._total_s / max(self._num, 1)
        quantum_s = min(max(self._scale * mean_s / MAX_RELOAD_SHARE, MIN_QUANTUM_S), LONGEST_QUANTUM_S)

        def is_recent(one: Resident) -> bool:
            is_past = one.is_strict and not one.is_current
            return one.num_running + one.num_queued > 0 or (not is_past and now < one.used_at + RECENT_S)

        kept = {one.name for one in residents if now < one.loaded_at + quantum_s and (one.is_current or is_recent(one))}
        movable = [one for one in residents if one.is_ready and one.name not in kept]
        idle = sorted(
            (one for one in movable if not one.num_running),
            key=lambda one: (is_recent(one), one.is_current, one.used_at),
        )
        busy = sorted(
            (one for one in movable if one.num_running),
            key=lambda one: (not one.is_yielding, -one.usage, one.loaded_at),
        )
        free, evict, load = num_slots - len(residents), list[str](), list[str]()
        yielding = list[Resident]()
        revoked = list[str]()
        is_short = False
        for demand in sorted(demands, key=lambda one: (one.urgency is Urgency.PREFETCH, one.usage, one.urgency)):
            is_waiting = demand.urgency is Urgency.WAITING
            may_lose = [
                one
                for one in idle
                if (is_waiting and one.usage >= demand.usage)
                or not (is_recent(one) or (one.is_current and demand.urgency is Urgency.PREFETCH))
            ]
            if free > 0:
                free -= 1
            elif may_lose:
                idle.remove(may_lose[0])
                evict.append(may_lose[0].name)
            else:
                is_short = is_short or demand.urgency is not Urgency.PREFETCH
                giving = next((one for one in busy if is_waiting and one.usage >= demand.usage), None)
                if giving is not None:
                    busy.remove(giving)
                    yielding.append(giving)
                    revoked += [giving.name] if giving.usage > demand.usage else []
                continue
            load.append(demand.name)
        due = (at - now for one in residents for at in (one.used_at + RECENT_S, one.loaded_at + quantum_s) if at > now)
        names = frozenset(one.name for one in yielding)
        return PagePlan(
            tuple(evict), tuple(load), names, frozenset(revoked), is_short=is_short, review_s=min(due, default=math.inf)
        )


@dataclass(eq=False, slots=True)
class Job:
    """A job. open: episodes of the step that have not ended. used_at: of its last request."""

    tenant: str
    is_strict: bool
    version: int = 0
    open: int = 0
    used_at: float = -math.inf


@dataclass(eq=False, slots=True)
class Request:
    """A turn on a version. left: turns of the episode, with this one."""

    job: Job
    version: int
    left: int


@dataclass(eq=False, slots=True)
class Loaded:
    """A version with a slot."""

    loaded_at: float
    used_at: float
    running: int = 0
    is_ready: bool = False
    is_yielding: bool = False


Key = tuple[Job, int]


@dataclass(eq=False)
class Simulation:
    """An engine with slots, and jobs.

    Attributes:
        first_s: seconds from each version's commit to its first token.
        reload_s: engine time of re-loads.
        steps: of each tenant.
    """

    num_slots: int
    rule: Rule
    load_s: float
    tool_s: float
    jobs: Sequence[Job]
    now: float = 0.0
    reload_s: float = 0.0
    first_s: list[float] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(0)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._slots: dict[Key, Loaded] = {}
        self._waiting: dict[Key, list[Request]] = {}
        self._queue: list[Request] = []
        self._committed: dict[Key, float] = {}
        self._served: set[Key] = set()
        self._proven: set[Key] = set()
        self._usage: dict[str, float] = {one.tenant: 0.0 for one in self.jobs}
        self._to_train: list[Job] = []
        self._is_training = False
        self._num_running, self._loads_until, self._review_at, self._stalled_s = 0, 0.0, 0.0, 0.0
        self._names = {one: f"job-{number}" for number, one in enumerate(self.jobs)}

    def run(self, seconds: float) -> None:
        """Run for so much simulated time."""
        for job in self.jobs:
            self._after(2 * self._random.random(), lambda job=job: self._begin(job, EPISODES))  # type: ignore[misc]
        while self._events and self._events[0][0] <= seconds:
            self.now, _, action = heapq.heappop(self._events)
            action()
            self._page()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), action))

    def _begin(self, job: Job, num_episodes: int) -> None:
        job.open += num_episodes
        for _ in range(num_episodes):
            self._ask(Request(job, job.version, TURNS))

    def _ask(self, request: Request) -> None:
        request.job.used_at = self.now
        self._waiting.setdefault((request.job, request.version), []).append(request)

    def _admit(self) -> None:
        """Give places in the engine to requests whose version is served, that of the tenant with the smallest usage first."""
        self._queue.sort(key=lambda one: self._usage[one.job.tenant])
        while self._queue and self._num_running < PLACES:
            request = self._queue.pop(0)
            key = (request.job, request.version)
            slot = self._slots[key]
            slot.running, slot.used_at, self._num_running = slot.running + 1, self.now, self._num_running + 1
            self._served.add(key)
            if (at := self._committed.pop(key, None)) is not None:
                self.first_s.append(self.now - at)
            seconds = self._random.expovariate(1 / TURN_S) * max(1.0, self._num_running / FULL_SPEED)
            self._usage[request.job.tenant] += seconds
            self._after(seconds, lambda request=request, stalled=self._stalled_s: self._end(request, stalled))  # type: ignore[misc]

    def _end(self, request: Request, stalled_s: float) -> None:
        """End a request. stalled_s: seconds of loads that it has waited for; those since then delay it further."""
        if (more_s := self._stalled_s - stalled_s) > 0:
            now_s = self._stalled_s
            self._after(more_s, lambda: self._end(request, now_s))
            return
        job = request.job
        slot = self._slots[job, request.version]
        slot.running, slot.used_at, job.used_at = slot.running - 1, self.now, self.now
        self._num_running -= 1
        if request.left > 1:
            turn = Request(job, request.version, request.left - 1)
            self._after(self._random.expovariate(1 / self.tool_s), lambda: self._ask(turn))
            return
        job.open -= 1
        is_full = job.open == 0 if job.is_strict else job.open % EPISODES == 0
        if is_full:
            self._to_train.append(job)
            self._train()
        if not job.is_strict:
            job.open += EPISODES if is_full else 0
            self._ask(Request(job, job.version, TURNS))

    def _train(self) -> None:
        if self._to_train and not self._is_training:
            job = min(self._to_train, key=lambda one: self.steps.get(one.tenant, 0))
            self._to_train.remove(job)
            self._is_training = True
            self._after(TRAINER_S, lambda: self._commit(job))

    def _commit(self, job: Job) -> None:
        self._is_training = False
        job.version += 1
        self.steps[job.tenant] = self.steps.get(job.tenant, 0) + 1
        self._committed[job, job.version] = self.now
        if job.is_strict:
            self._begin(job, EPISODES)
        self._train()

    def _name(self, key: Key) -> str:
        return f"{self._names[key[0]]}/{key[1]}"

    def _page(self) -> None:
        """Apply the rule's plan."""
        demands: dict[str, tuple[Key, PageDemand]] = {}
        newest = sorted(((one, one.version) for one in self.jobs), key=lambda key: -key[0].used_at)
        for key in (*self._waiting, *newest):
            if key not in self._slots and (name := self._name(key)) not in demands:
                is_successor = self.now - key[0].used_at < IN_USE_S and key not in self._proven
                urgency = Urgency.SUCCESSOR if is_successor else Urgency.PREFETCH
                urgency = Urgency.WAITING if key in self._waiting else urgency
                demands[name] = key, PageDemand(name, urgency, key in self._served, self._usage[key[0].tenant])
        residents = {self._name(key): key for key in self._slots}
        plan = self.rule.plan(
            self.num_slots, [*map(self._resident, self._slots)], [one for _, one in demands.values()], self.now
        )
        for name in (*plan.evict, *plan.revoked):
            self._send_back(residents[name])
        for name in plan.evict:
            del self._slots[residents[name]]
        for name in plan.load:
            self._load(demands[name][0])
        for key, slot in self._slots.items():
            slot.is_yielding = self._name(key) in plan.yielding
            if slot.is_ready and not slot.is_yielding:
                self._queue += self._waiting.pop(key, ())
        self._admit()
        at = self.now + max(plan.review_s, 0.02)
        if self._waiting and at < math.inf and not self.now < self._review_at <= at:
            self._review_at = at
            self._after(at - self.now, lambda: None)

    def _send_back(self, key: Key) -> None:
        back = [one for one in self._queue if (one.job, one.version) == key]
        self._queue = [one for one in self._queue if one not in back]
        if back:
            self._waiting.setdefault(key, []).extend(back)

    def _resident(self, key: Key) -> Resident:
        (job, version), slot = key, self._slots[key]
        queued = sum((one.job, one.version) == key for one in self._queue)
        return Resident(
            self._name(key),
            slot.loaded_at,
            slot.used_at,
            slot.running,
            queued,
            is_ready=slot.is_ready,
            is_current=version == job.version,
            is_strict=job.is_strict,
            usage=self._usage[job.tenant],
            has_served=key in self._served,
            is_yielding=slot.is_yielding,
        )

    def _load(self, key: Key) -> None:
        slot = self._slots[key] = Loaded(self.now, self.now)
        num_running = self._num_running
        self._loads_until = max(self.now, self._loads_until) + self.load_s

        def loaded() -> None:
            slot.is_ready, slot.used_at, is_reload = True, self.now, key in self._served
            self._stalled_s += self.load_s
            self._proven.add(key)
            self.reload_s += self.load_s if is_reload and num_running else 0.0
            self.rule.loaded(self._name(key), self.load_s, self.now, is_reload, num_running)

        self._after(self._loads_until - self.now, loaded)


def rows(seconds: float, load_s: float) -> Iterator[list[str]]:
    """Simulate every workload with every rule."""
    for num_jobs, num_slots, is_strict, tool_s in (
        *((32, 16, is_strict, tool_s) for is_strict in (True, False) for tool_s in (0.4, 5.0)),
        (101, 32, True, 0.4),
        (101, 32, False, 0.4),
    ):
        rules: dict[str, Rule] = {
            "present": Present(PLACES),
            "full price": Present(1),
            "quantum": Quantum(1),
            "quantum of all": Quantum(num_slots),
        }
        for name, rule in rules.items():
            jobs = [
                Job("one" if num_jobs > 100 and not at else f"t{at % 4 if num_jobs < 100 else 0}", is_strict)
                for at in range(num_jobs)
            ]
            found = Simulation(num_slots, rule, load_s, tool_s, jobs)
            found.run(seconds)
            waits = sorted(found.first_s) or [math.inf]
            yield [
                f"{num_jobs} {'strict' if is_strict else 'asynchronous'}, {num_slots}, {tool_s} s",
                name,
                f"{sum(found.steps.values()) / seconds:.2f}",
                f"{found.steps.get('one', 0) / seconds:.2f}" if num_jobs > 100 else "",
                f"{found.reload_s / seconds:.1%}",
                f"{waits[len(waits) // 2]:.1f}; {waits[len(waits) * 99 // 100]:.1f}",
            ]


def main(arguments: Sequence[str] = ()) -> None:
    parser = options("slots", __doc__)
    parser.add_argument("--seconds", type=float, default=120, help="of simulated time; default: %(default)s")
    parser.add_argument("--load-s", type=float, default=0.02, help="seconds of a load; default: %(default)s")
    chosen: argparse.Namespace = parser.parse_args(arguments)
    head = [
        "jobs, slots, tools",
        "rule",
        "steps/s",
        "of the small tenant",
        "re-loads",
        "commit to first token, s, p50; p99",
    ]
    print_table(head, rows(chosen.seconds, chosen.load_s))
