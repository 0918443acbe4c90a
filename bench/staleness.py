"""Which groups asynchronous jobs train, in simulated time: steps that wait for slow groups, against dropping stale ones.

The product's `Assembly` assigns groups to steps. Groups are played at once and pinned to the newest committed version. A
member's time is the sum of one or more log-normal times of median 1 and SIGMA, and a group lasts as long as its slowest member. An agent's trainer takes
the same time for each step. `dropping` is the assignment before pacing: a group that lasts too long is dropped. For each bound
are printed: the time of a step (in median replies); steps a second against strict mode and against dropping; the groups that
were dropped, of all and of the slowest fifth; and the largest difference between the distributions of the times of trained
and of issued groups (two-sample Kolmogorov-Smirnov). `--runs` and `--halves` measure real runs (`staleness_runs`).
"""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from bench import options
from bench.runs import table
from marlaas_api.messages import AgentClosed, GroupOutcome, GroupReady, StepClosed, TrajectoryRef
from marlaas_api.names import JobRef, train_group
from marlaas_worker.orchestrator.experience import AgentGroup, CompleteGroup
from marlaas_worker.orchestrator.steps import Assembly, Decision, Sampled, StepRules

REF = JobRef("bench", "staleness", "u1")
SIGMA, GROUP_SIZE, PER_STEP, STEPS = 1.0, 8, 8, 400
BOUNDS = (1, 2, 4, 8)
TRAINER_S = (0.1, 0.5, 1.0, 4.0)


class Dropping(Assembly):
    """The assignment before pacing: no step waits for a group, and one that is too stale is dropped."""

    def closing(self) -> StepClosed | None:
        self.oldest.clear()
        return super().closing()

    def next_decision(self, ready: Sequence[Sampled]) -> Sampled | None:
        return next(iter(ready), None)

    def want(self, in_flight: int, served: Mapping[str, int]) -> int:
        needed = self.needed_versions(in_flight)
        is_early = self.rules.max_staleness > 0 and any(needed[agent] > version for agent, version in served.items())
        return 0 if is_early else super().want(in_flight, self.next_versions)


@dataclass(frozen=True, slots=True)
class World:
    """Parameters of a simulation.

    flat: share of the groups without signal. trainer_s: seconds of an agent's step. calls: log-normal times of one member.
    """

    bound: int
    trainer_s: float = 0.5
    flat: float = 0.0
    agents: tuple[str, ...] = ("policy",)
    steps: int = STEPS
    per_step: int = PER_STEP
    refill: int = 2
    seed: int = 0
    calls: int = 1


@dataclass(slots=True)
class Simulation:
    """One job. Results: durations of issued groups by index, and the indices of those that were trained or dropped."""

    world: World
    assigned: Callable[[JobRef, StepRules, dict[str, int]], Assembly] = Assembly
    durations: dict[int, float] = field(default_factory=dict)
    trained: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    staleness: int = 0
    now: float = 0.0
    _complete: dict[int, CompleteGroup] = field(default_factory=dict)
    _pins: dict[int, dict[str, int]] = field(default_factory=dict)
    _events: list[tuple[float, int, str, int]] = field(default_factory=list)
    _closed: dict[str, list[int]] = field(default_factory=dict)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def run(self) -> "Simulation":
        """Simulate all steps."""
        world, chance = self.world, random.Random(self.world.seed)
        rules = StepRules(world.per_step, world.bound, world.refill, world.steps)
        steps = self.assigned(REF, rules, dict.fromkeys(world.agents, 0))
        versions, committed = dict.fromkeys(world.agents, 0), dict.fromkeys(world.agents, -1)
        self._closed = {agent: [] for agent in world.agents}
        done = 0
        while done < world.steps:
            self._decide(steps)
            while (draft := steps.recordable(committed)) is not None:
                steps.recorded(draft.step, versions, [agent for agent, part in draft.agents.items() if part.assigned])
                done += 1
                self._decide(steps)
            for _ in range(steps.want(len(self._pins), versions)):
                self._issue(steps, versions, chance)
            if done == world.steps:
                break
            self.now, number, kind, _ = heapq.heappop(self._events)
            if kind == "group":
                self._complete[number] = self._group(number)
            else:
                versions[kind] += 1
                committed[kind] = number
                self._closed[kind].pop(0)
                self._train(kind)
        return self

    def _issue(self, steps: Assembly, versions: Mapping[str, int], chance: random.Random) -> None:
        index = len(self.durations)
        calls = range(self.world.calls)
        self.durations[index] = max(sum(chance.lognormvariate(0.0, SIGMA) for _ in calls) for _ in range(GROUP_SIZE))
        self._pins[index] = steps.oldest[index] = dict(versions) if self.world.bound else steps.next_versions
        heapq.heappush(self._events, (self.now + self.durations[index], index, "group", index))

    def _decide(self, steps: Assembly) -> None:
        while True:
            closed = steps.closing()
            if closed is not None:
                self._note(steps, closed)
            pairs = steps.in_order([(self._pins[group.index], group) for group in self._ready()])
            decided = steps.next_decision(pairs)
            if decided is not None:
                versions, group = decided
                del self._complete[group.index], self._pins[group.index]
                self._note(steps, steps.decision(group, versions))
            elif closed is None:
                return

    def _ready(self) -> list[CompleteGroup]:
        """Return the complete groups; in strict mode those before the first one that is not complete."""
        if self.world.bound:
            return list(self._complete.values())
        in_flight = sorted(self._pins)
        return [self._complete[index] for index in itertools.takewhile(self._complete.__contains__, in_flight)]

    def _note(self, steps: Assembly, decided: Decision) -> None:
        steps.apply(decided)
        for message in decided.parts:
            if isinstance(message, AgentClosed):
                if message.num_groups:
                    self._closed[message.agent].append(message.step)
                    if len(self._closed[message.agent]) == 1:
                        self._train(message.agent)
            elif isinstance(message, GroupReady):
                self.trained.add(message.index)
                self.staleness = max(self.staleness, message.staleness)
            elif message.outcome is GroupOutcome.SIGNAL:
                self.dropped.add(message.index)

    def _train(self, agent: str) -> None:
        if self._closed[agent]:
            at = self.now + self.world.trainer_s
            heapq.heappush(self._events, (at, self._closed[agent][0], agent, next(self._numbers)))

    def _group(self, index: int) -> CompleteGroup:
        is_flat = random.Random(f"{self.world.seed} {index}").random() < self.world.flat
        rewards = (1.0, 1.0) if is_flat else (1.0, 0.0)
        outcome = GroupOutcome.FLAT if is_flat else GroupOutcome.SIGNAL
        refs = tuple(TrajectoryRef(member=i, episode=f"e{i}", leaves=(0,), reward=one) for i, one in enumerate(rewards))
        parts = {agent: AgentGroup(refs, outcome, rewards) for agent in self.world.agents}
        return CompleteGroup(index, train_group(REF, index), parts, Counter())

    @property
    def step_s(self) -> float:
        """Mean time of a step."""
        return self.now / self.world.steps

    def share_dropped(self, slowest: float = 1.0) -> float:
        """Return the share of dropped groups among the slowest ones that were decided with signal."""
        decided = sorted(self.trained | self.dropped, key=lambda index: self.durations[index])
        chosen = decided[round(len(decided) * (1 - slowest)) :]
        return fmean(index in self.dropped for index in chosen)

    def distance(self) -> float:
        """Return the two-sample Kolmogorov-Smirnov statistic of the times of trained and of issued groups with signal."""
        issued = sorted(self.durations[index] for index in self.trained | self.dropped)
        trained = sorted(self.durations[index] for index in self.trained)
        below, largest = 0, 0.0
        for number, value in enumerate(issued, 1):
            while below < len(trained) and trained[below] <= value:
                below += 1
            largest = max(largest, abs(number / len(issued) - below / len(trained)))
        return largest


def rows(world: World) -> list[list[str]]:
    """Return a row for strict mode, and two for each bound."""
    strict = Simulation(replace(world, bound=0)).run()
    found = [["strict", "0", f"{strict.step_s:.2f}", "1.00", "", "0 %", "0 %", "0.000"]]
    for bound in BOUNDS:
        dropping, pacing = (Simulation(replace(world, bound=bound), one).run() for one in (Dropping, Assembly))
        for name, one in (("dropping", dropping), ("pacing", pacing)):
            found.append(
                [
                    name,
                    f"{bound}",
                    f"{one.step_s:.2f}",
                    f"{strict.step_s / one.step_s:.2f}",
                    f"{dropping.step_s / one.step_s:.2f}",
                    f"{one.share_dropped():.0%}",
                    f"{one.share_dropped(0.2):.0%}",
                    f"{one.distance():.3f}",
                ]
            )
    return found


HEAD = ["assignment", "bound", "time a step", "steps/s to strict", "to dropping", "dropped", "of slowest fifth", "KS"]


def main(arguments: Sequence[str] = ()) -> None:
    parser = options("staleness", __doc__)
    parser.add_argument("--steps", type=int, help=f"default: {STEPS} of a simulation, 30 of a run")
    parser.add_argument("--runs", action="store_true", help="real runs of a job whose tools wait")
    parser.add_argument("--halves", action="store_true", help="real runs of a job half of whose tasks take long")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of --halves; default: 0 1 2")
    chosen = parser.parse_args(arguments)
    if chosen.runs or chosen.halves:
        from bench import staleness_runs  # imported late: an orchestrator imports this module for `Dropping`

        if chosen.runs:
            staleness_runs.measure_runs(chosen.steps or 30)
        if chosen.halves:
            staleness_runs.measure_halves(chosen.steps or 30, chosen.seeds)
        return
    steps = chosen.steps or STEPS
    for trainer_s in TRAINER_S:
        print(f"\ntrainer {trainer_s:g} median replies a step\n")
        print(table(HEAD, rows(World(0, trainer_s, steps=steps))))
    print("\neight calls a reply, trainer 0.5\n")
    print(table(HEAD, rows(World(0, calls=8, steps=steps))))
    print("\nhalf of the groups without signal, trainer 0.5\n")
    print(table(HEAD, rows(World(0, flat=0.5, steps=steps))))
    print("\nthree agents, trainers 0.5\n")
    print(table(HEAD, rows(World(0, agents=("a", "b", "c"), steps=steps))))


if __name__ == "__main__":
    main()
