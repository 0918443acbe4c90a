"""Step assembly: what is trained when, in which order, and how stale. GroupReady and AgentClosed are checked field by field."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from bench.staleness import Dropping, Simulation, World
from tests.harness import job_document

from marlaas_api.messages import (
    AgentClosed,
    Ending,
    GroupOutcome,
    GroupReady,
    GroupUnused,
    StepOutcome,
    TrajectoryRef,
    UntrainedStep,
    UsageAmounts,
)
from marlaas_api.names import JobRef, train_group
from marlaas_worker.orchestrator.experience import AgentGroup, CompleteGroup
from marlaas_worker.orchestrator.job_state import RecordedTotals
from marlaas_worker.orchestrator.step_records import Around, step_record
from marlaas_worker.orchestrator.steps import Assembly, StepRules

REF = JobRef("team-a", "sums", "u1")
STRICT = StepRules(groups_per_step=2, max_staleness=0, max_refill=1, steps=3)
ASYNC = StepRules(groups_per_step=2, max_staleness=1, max_refill=1, steps=3)


def group(index: int, outcome: GroupOutcome = GroupOutcome.SIGNAL, ending: Ending = Ending.COMPLETED) -> CompleteGroup:
    rewards = {GroupOutcome.SIGNAL: (1.0, 0.0), GroupOutcome.FLAT: (1.0, 1.0)}.get(outcome, (1.0,))
    part = {"leaves": (0,), "ending": ending}
    trajectories = tuple(TrajectoryRef(member=i, episode=f"e{i}", reward=r, **part) for i, r in enumerate(rewards))
    own = {"policy": AgentGroup(trajectories, outcome, rewards)}
    return CompleteGroup(index, train_group(REF, index), own, Counter({"env": 2 - len(rewards)}))


def flat(index: int) -> CompleteGroup:
    return group(index, GroupOutcome.FLAT)


def fresh(rules: StepRules) -> Assembly:
    return Assembly(REF, rules, {"policy": 0})


def resolve(steps: Assembly, decided: CompleteGroup, versions, usage=None):
    """Apply the decision about a group, and close the step if it may close; return the agents' parts of these messages."""
    steps.apply(first := steps.decision(decided, versions, usage))
    closed = steps.closing()
    if closed is not None:
        steps.apply(closed)
    return [part for one in (first, closed) if one is not None for part in one.parts]


def record(steps: Assembly, step: int, version: int) -> None:
    """Record a step, after which the policy has this version."""
    steps.recorded(step, {"policy": version}, ["policy"])


def trained(num: int) -> Assembly:
    """The steps of a job after `num` recorded ones."""
    steps = fresh(ASYNC)
    for step in range(num):
        record(steps, step, step + 1)
    return steps


def test_what_would_be_too_stale_is_dropped_and_counted():
    steps = fresh(ASYNC)
    for index in range(4):
        resolve(steps, group(index), {"policy": 0})
    used = {"policy": UsageAmounts(generated_tokens=7, open_tokens=7)}
    (unused,) = resolve(steps, group(4), {"policy": 0}, used)
    assert isinstance(unused, GroupUnused)
    assert (unused.step, unused.outcome, unused.usage.stale_tokens) == (2, GroupOutcome.SIGNAL, 7)
    assert [one.index for one in steps.open.agents["policy"].dropped] == [4]
    assert steps.open.agents["policy"].base_version == 2


def test_credits_bound_what_is_outstanding_and_no_group_is_given_out_for_which_no_step_has_a_place():
    steps, served = fresh(ASYNC), {"policy": 0}
    assert (steps.want(0, served), steps.want(3, served)) == (4, 1)
    resolve(steps, group(0), {"policy": 0})
    assert steps.want(3, served) == 0
    assert trained(2).want(0, {"policy": 2}) == 2, "what is left to train"
    steps = fresh(StepRules(groups_per_step=3, max_staleness=1, max_refill=0, steps=2))
    assert steps.want(0, served) == 6
    for index in range(2):
        resolve(steps, flat(index), {"policy": 0})
    assert steps.want(0, served) == 4, "one more closes this step, and the next one has three places"


def test_steps_that_train_different_agents_count_together_against_the_credits():
    steps = Assembly(REF, ASYNC, {"a": 0, "b": 0})
    uncalled = AgentGroup((), GroupOutcome.UNCALLED, ())
    for index, agents in enumerate((("a", "b"), ("a", "b"), ("b", "a"), ("b", "a"))):
        one = group(index)
        own = {agents[0]: one.agents["policy"], agents[1]: uncalled}
        resolve(steps, replace(one, agents={name: own[name] for name in ("a", "b")}), {"a": 0, "b": 0})
    assert steps.next_versions == {"a": 1, "b": 1}
    assert steps.want(0, {"a": 0, "b": 0}) == 0, "four groups are closed and not committed"


def test_a_step_waits_for_groups_that_only_it_can_train_and_keeps_places_for_them():
    steps = trained(1)
    steps.oldest = {0: {"policy": 0}, 1: {"policy": 1}, 2: {"policy": 1}}
    assert steps.urgent == {0}
    old, young, another = ({"policy": 0}, group(0)), ({"policy": 1}, group(1)), ({"policy": 1}, group(2))
    assert steps.next_decision([young]) is young
    resolve(steps, group(1), {"policy": 1})
    assert steps.next_decision([another]) is None, "the last place is kept"
    assert steps.next_decision([another, old]) is old
    without = ({"policy": 1}, flat(2))
    assert steps.next_decision([another, old, without]) is without
    *_, closed = resolve(steps, group(0), {"policy": 0})
    assert (type(closed), closed.num_groups) == (AgentClosed, 2)
    assert steps.want(1, {"policy": 1}) == 1, "the next step has one place for a group of version 1"


@pytest.mark.parametrize("flats", [0.0, 0.5])
@pytest.mark.parametrize("bound", [1, 2, 4, 8])
def test_the_trained_groups_have_the_durations_of_the_issued_ones(bound, flats):
    for agents, refill in itertools.product((("policy",), ("a", "b")), (0, 2)):
        world = World(bound, flat=flats, agents=agents, steps=40, per_step=4, refill=refill)
        pacing = Simulation(world).run()
        assert (pacing.dropped, pacing.distance()) == (set(), 0.0)
        assert pacing.staleness <= bound
        assert Simulation(world, Dropping).run().share_dropped(0.2) > 0.2, "without it, slow groups are missing"


def test_groups_without_signal_are_drawn_anew_within_a_bound_and_then_the_step_goes_with_what_it_has():
    steps = fresh(STRICT)
    resolve(steps, flat(0), {"policy": 0})
    resolve(steps, group(1), {"policy": 0})
    assert steps.want(0, {"policy": 0}) == 1
    resolve(steps, flat(2), {"policy": 0})
    assert steps.want(0, {"policy": 0}) == 1
    _, closed = resolve(steps, flat(3), {"policy": 0})
    assert (type(closed), closed.num_groups) == (AgentClosed, 1)
    assert [one.index for one in steps.drafts[0].resolved] == [0, 1, 2, 3]


def test_a_step_without_any_signal_is_a_no_op_that_makes_no_version_and_gives_the_trainer_nothing():
    steps = fresh(STRICT)
    *unused, closed = (part for index in range(4) for part in resolve(steps, flat(index), {"policy": 0}))
    found = [(type(one), one.index, one.outcome, one.rewards) for one in unused]
    assert found == [(GroupUnused, index, GroupOutcome.FLAT, (1.0, 1.0)) for index in range(4)]
    assert (type(closed), closed.step, closed.num_groups) == (AgentClosed, 0, 0)
    assert not steps.recordable({"policy": -1}).trained
    assert (steps.open.step, steps.open.agents["policy"].base_version) == (1, 0)


def test_demonstrated_steps_are_the_next_rows_played_ahead_and_the_first_sampled_step_begins_after_them():
    steps = fresh(replace(ASYNC, demonstrated=2, rows_per_step=3))
    assert steps.want(0, {"policy": 0}) == 6
    rows = [group(index, GroupOutcome.FAULTED if index == 1 else GroupOutcome.SIGNAL) for index in range(6)]
    assert [one.index for _, one in steps.in_order([({"policy": 0}, one) for one in rows[::-1]])] == list(range(6))
    messages = [part for one in rows for part in resolve(steps, one, {"policy": 0})]
    ends = [(one.step, one.num_groups) for one in messages if isinstance(one, AgentClosed)]
    assert ends == [(0, 2), (1, 3)], "a row that cannot be played is not replaced"
    assert [(one.index, one.staleness) for one in messages if isinstance(one, GroupReady)] == [
        (index, 0) for index in (0, 2, 3, 4, 5)
    ]
    for version in (1, 2):
        assert steps.want(0, {"policy": version}) == 0
        record(steps, version - 1, version)
    assert (steps.want(0, {"policy": 2}), steps.is_in_order) == (2, False)


def test_a_step_that_trained_no_token_lowers_the_versions_of_the_steps_after_it_which_still_follow_it():
    steps = fresh(ASYNC)
    for index in range(4):
        *_, closed = resolve(steps, group(index), {"policy": 0})
    assert (closed.step, closed.base_version, closed.follows) == (1, 1, 0)
    record(steps, steps.recordable({"policy": 0}).step, 0)
    (ready,) = resolve(steps, group(4), {"policy": 0})
    assert (ready.step, ready.base_version, ready.follows) == (2, 1, 1)


@pytest.mark.parametrize(
    ("groups", "trainers", "causes"),
    [
        ([flat(0), group(1, GroupOutcome.FLAT, Ending.MAX_TURNS)], None, {"flat": 1, "out-of-turns": 1}),
        ([group(0, GroupOutcome.FAULTED), group(1, GroupOutcome.UNCALLED)], None, {"faulted": 1, "uncalled": 1}),
        ([group(0), flat(1)], "masked", {"masked": 1, "flat": 1}),
    ],
)
def test_a_record_counts_why_its_groups_trained_nothing(groups, trainers, causes):
    steps = fresh(StepRules(groups_per_step=2, max_staleness=0, max_refill=0, steps=3))
    for one in groups:
        resolve(steps, one, {"policy": 0}, {"policy": UsageAmounts(generated_tokens=7, open_tokens=7)})
    reports = {"policy": UntrainedStep(step=0, cause=trainers, train_s=2.0)} if trainers else {}
    made = step_record(job_document(), steps.drafts[0], {}, Around(0.0, 0.0, untrained=reports))
    assert (made.outcome, made.version, made.agents["policy"].untrained) == (StepOutcome.NO_OP, 0, causes)
    amounts = made.usage["policy"]
    assert (amounts.wasted_tokens, amounts.trainer_s) == (14, 2.0 if trainers else 0.0)
    totals = RecordedTotals()
    totals.add_step(made)
    assert totals.untrained == {"policy": {next(iter(causes)): 1}}
