"""Step assembly: what is trained when, in which order, and how stale. GroupReady and StepClosed are checked field by field."""

from collections import Counter

from marlaas_api.messages import GroupReady, StepClosed, TrajectoryRef
from marlaas_api.names import JobRef, train_group
from marlaas_worker.orchestrator.experience import CompleteGroup, GroupOutcome
from marlaas_worker.orchestrator.steps import Assembly, StepRules

REF = JobRef("team-a", "sums", "u1")
STRICT = StepRules(groups_per_step=2, max_staleness=0, max_refill=1, steps=3)
ASYNC = StepRules(groups_per_step=2, max_staleness=1, max_refill=1, steps=3)


def group(index: int, verdict: GroupOutcome = GroupOutcome.SIGNAL) -> CompleteGroup:
    rewards = (1.0, 0.0) if verdict is GroupOutcome.SIGNAL else (1.0, 1.0)
    trajectories = tuple(TrajectoryRef(member=i, episode=f"e{i}", leaves=(0,), reward=r) for i, r in enumerate(rewards))
    return CompleteGroup(index, index, train_group(REF, index), trajectories, verdict, Counter())


def flat(index: int) -> CompleteGroup:
    return group(index, GroupOutcome.FLAT)


def fresh(rules: StepRules) -> Assembly:
    return Assembly(REF, "policy", rules, recorded=0, version=0)


def test_a_full_step_closes_and_the_next_one_trains_on_the_version_it_will_make():
    steps = fresh(ASYNC)
    assert [type(m) for m in steps.resolve(group(0), 0)] == [GroupReady]
    ready, closed = steps.resolve(group(1), 0)
    assert isinstance(ready, GroupReady)
    assert (ready.step, ready.base_version, ready.position) == (0, 0, 1)
    assert isinstance(closed, StepClosed)
    assert (closed.num_groups, closed.indices) == (2, (0, 1))
    (third,) = steps.resolve(group(2), 0)
    assert isinstance(third, GroupReady)
    assert (third.step, third.base_version, third.staleness) == (1, 1, 1)


def test_what_would_be_too_stale_is_dropped_and_counted():
    steps = fresh(ASYNC)
    for index in range(4):
        steps.resolve(group(index), 0)
    assert steps.resolve(group(4), 0) == []
    assert steps.open is not None
    assert [one.index for one in steps.open.dropped] == [4]
    assert steps.open.base_version == 2


def test_credits_bound_what_is_outstanding():
    steps = fresh(ASYNC)
    assert steps.want(0) == 4
    assert steps.want(3) == 1
    steps.resolve(group(0), 0)
    assert steps.want(3) == 0


def test_no_group_is_given_out_for_which_no_step_has_a_place():
    steps = fresh(StepRules(groups_per_step=3, max_staleness=1, max_refill=0, steps=2))
    assert steps.want(0) == 6
    steps.resolve(flat(0), 0)
    steps.resolve(flat(1), 0)
    assert steps.want(0) == 4, "one more closes this step, and the next one has three places"


def test_credits_never_exceed_what_is_left_to_train():
    steps = Assembly(REF, "policy", ASYNC, recorded=2, version=2)
    assert steps.want(0) == 2


def test_strict_mode_gives_out_one_round_at_a_time_and_only_at_the_current_version():
    steps = fresh(STRICT)
    assert steps.want(0) == 2
    assert steps.want(1) == 0
    steps.resolve(group(0), 0)
    steps.resolve(group(1), 0)
    assert steps.want(0) == 0, "the next step waits for the commit"
    draft = steps.recordable(committed_step=0)
    assert draft is not None
    steps.recorded(draft, version=1)
    assert steps.want(0) == 2
    assert steps.open is not None
    assert steps.open.base_version == 1


def test_groups_without_signal_are_drawn_anew_within_a_bound_and_then_the_step_goes_with_what_it_has():
    steps = fresh(STRICT)
    steps.resolve(flat(0), 0)
    steps.resolve(group(1), 0)
    assert steps.want(0) == 1
    steps.resolve(flat(2), 0)
    assert steps.want(0) == 1
    (closed,) = steps.resolve(flat(3), 0)
    assert isinstance(closed, StepClosed)
    assert (closed.num_groups, closed.indices) == (1, (0, 1, 2, 3))


def test_a_step_without_any_signal_is_a_no_op_that_makes_no_version_and_tells_the_trainer_nothing():
    steps = fresh(STRICT)
    assert [m for index in range(4) for m in steps.resolve(flat(index), 0)] == []
    draft = steps.recordable(committed_step=-1)
    assert draft is not None
    assert draft.no_op
    assert steps.open is not None
    assert (steps.open.step, steps.open.base_version) == (1, 0)


def test_a_no_op_is_recorded_only_after_the_steps_before_it():
    steps = fresh(ASYNC)
    for one in (group(0), group(1), flat(2), flat(3), flat(4), flat(5)):
        steps.resolve(one, 0)
    assert steps.recordable(committed_step=-1) is None
    first = steps.recordable(committed_step=0)
    assert first is not None
    steps.recorded(first, 1)
    second = steps.recordable(committed_step=0)
    assert second is not None
    assert second.no_op


def test_nothing_opens_after_the_last_step():
    steps = Assembly(REF, "policy", STRICT, recorded=2, version=2)
    steps.resolve(group(0), 2)
    steps.resolve(group(1), 2)
    assert steps.open is None
    assert steps.want(0) == 0
    assert steps.resolve(group(2), 2) == []


def test_restored_from_its_log_an_assembly_decides_as_if_it_had_never_stopped():
    groups = [flat(0), group(1), group(2), group(3), flat(4), group(5)]
    whole, log = fresh(ASYNC), []
    for one in groups:
        log += whole.resolve(one, 0)
    for cut in range(len(log) + 1):
        resumed = fresh(ASYNC)
        resumed.restore(log[:cut])
        again = log[:cut] + resumed.close_if_due()
        for one in groups:
            again += resumed.resolve(one, 0)
        readies = [m for m in again if isinstance(m, GroupReady)]
        assert [(m.step, m.position, m.group) for m in readies] == [
            (m.step, m.position, m.group) for m in log if isinstance(m, GroupReady)
        ], f"cut after {cut}"
        closed = [(m.step, m.indices) for m in again if isinstance(m, StepClosed)]
        assert closed == [(m.step, m.indices) for m in log if isinstance(m, StepClosed)], f"cut after {cut}"


def test_what_was_dropped_before_a_crash_is_counted_after_it():
    whole, log = fresh(ASYNC), []
    for index in range(5):
        log += whole.resolve(group(index), 0)
    for index in (5, 6):
        log += whole.resolve(group(index), 2)
    resumed = fresh(ASYNC)
    resumed.restore(log)
    for index in range(7):
        resumed.resolve(group(index), 0)
    assert [[one.index for one in draft.dropped] for draft in resumed.drafts] == [[], [], [4]]


def test_a_group_without_signal_keeps_its_step_when_the_orchestrator_died_before_the_step_was_closed():
    whole, groups = fresh(STRICT), [group(0), flat(1), group(2)]
    log = [message for one in groups for message in whole.resolve(one, 0)]
    resumed = fresh(STRICT)
    resumed.restore(log[:-1])
    assert resumed.close_if_due() == []
    assert [message for one in groups for message in resumed.resolve(one, 0)] == log[-1:]
    assert [one.index for one in resumed.drafts[0].resolved] == [0, 1, 2]
    assert resumed.drafts[1].resolved == []


def test_a_step_that_is_full_on_record_takes_no_other_group_before_its_own_are_back():
    first, again = fresh(ASYNC), fresh(ASYNC)
    log = [message for index in range(2) for message in first.resolve(group(index), 0)]
    again.restore(log[:2])  # killed before it wrote that the step is closed
    other, empty = group(2), flat(3)
    assert again.in_turn([other]) == []
    assert again.in_turn([other, group(0), empty]) == [group(0), empty]
    assert again.resolve(group(0), 0) == []
    assert again.resolve(group(1), 0) == log[2:]
    assert again.in_turn([other]) == [other]


def test_groups_without_signal_are_found_again_in_the_step_that_they_closed_in_silence():
    first, again = fresh(ASYNC), fresh(ASYNC)
    for index in range(4):
        assert first.resolve(flat(index), 0) == []
    again.restore(list(first.resolve(group(4), 0)))
    for index in range(5):
        again.resolve(flat(index) if index < 4 else group(4), 0)
    assert [[one.index for one in draft.resolved] for draft in again.drafts] == [[0, 1, 2, 3], [4]]
    assert [draft.no_op for draft in again.drafts] == [True, False]


def test_what_ends_after_the_last_step_is_closed_is_counted_in_it_and_not_trained():
    steps = fresh(StepRules(groups_per_step=1, max_staleness=1, max_refill=0, steps=1))
    steps.resolve(group(0), 0)
    assert steps.open is None
    assert steps.resolve(group(1), 0) == []
    (last,) = steps.drafts
    assert [one.index for one in last.resolved] == [0, 1]
    assert ([one.index for one in last.dropped], len(last.assigned)) == ([1], 1)
