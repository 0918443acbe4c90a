"""The log of groups as steps: each position once and in order, for the version that it was assigned to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlaas_api.messages import GroupReady, StepClosed, TrajectoryRef
from marlaas_worker.trainer.intake import LogInvalid, StepInbox

Log = list[GroupReady | StepClosed]
IDS = {"namespace": "team-a", "job": "sums", "uid": "uid", "agent": "policy"}


def ready(
    step: int, position: int, *, base: int | None = None, version: int | None = None, name: str = ""
) -> GroupReady:
    base = step if base is None else base
    return GroupReady(
        **IDS,
        step=step,
        base_version=base,
        position=position,
        group=name or f"uid-t{10 * step + position}",
        index=10 * step + position,
        version=base if version is None else version,
        trajectories=(TrajectoryRef(member=0, episode="e", leaves=(0,), reward=1.0),),
    )


def closed(step: int, num_groups: int, base: int | None = None) -> StepClosed:
    return StepClosed(**IDS, step=step, base_version=step if base is None else base, num_groups=num_groups)


def drain(inbox: StepInbox) -> list[str]:
    """Train whatever can be trained; the names of groups and the numbers of steps, as it happens."""
    done = []
    while True:
        if (group := inbox.next_group()) is not None:
            done.append(group.group)
            inbox.take(group)
        elif (due := inbox.due()) is not None:
            done.append(f"step {due.step}: {' '.join(inbox.consumed())}")
            inbox.commit(due.step, inbox.version + 1)
        else:
            return done


def train(inbox: StepInbox, messages: Log) -> None:
    for message in messages:
        inbox.add(message)
        drain(inbox)


WHOLE: Log = [ready(0, 0), ready(0, 1), closed(0, 2), ready(1, 0), closed(1, 1)]
TRAINED = ["uid-t0", "uid-t1", "step 0: uid-t0 uid-t1", "uid-t10", "step 1: uid-t10"]


@given(order=st.permutations(range(len(WHOLE))), repeats=st.lists(st.integers(0, len(WHOLE) - 1), max_size=8))
def test_in_whatever_order_and_however_often_messages_of_two_steps_come_each_is_trained_once(order, repeats):
    inbox, done = StepInbox(-1, 0), []
    for number in [*order, *repeats]:
        inbox.add(WHOLE[number])
        done += drain(inbox)
    assert done == TRAINED


@pytest.mark.parametrize(("committed", "left"), [(-1, TRAINED), (0, TRAINED[3:]), (1, [])])
def test_steps_that_are_committed_already_are_ignored(committed, left):
    inbox = StepInbox(committed, committed + 1)
    for message in WHOLE:
        assert inbox.is_committed(message) == (message.step <= committed)
        inbox.add(message)
    assert drain(inbox) == left


def test_a_step_without_signal_is_skipped_by_number_and_not_by_version():
    inbox = StepInbox(0, 1)
    for message in (ready(3, 0, base=1), closed(3, 1, base=1)):
        inbox.add(message)
    assert drain(inbox) == ["uid-t30", "step 3: uid-t30"]
    assert (inbox.committed_step, inbox.version) == (3, 2)


def test_after_a_step_that_trained_no_token_the_next_one_goes_on_at_the_old_version():
    inbox, of_step_1 = StepInbox(-1, 0), {"follows": 0}
    inbox.add(ready(1, 0).model_copy(update=of_step_1))
    assert inbox.has_gap
    inbox.commit(0, 0)
    inbox.add(closed(1, 1).model_copy(update=of_step_1))
    assert (inbox.has_gap, drain(inbox)) == (False, ["uid-t10", "step 1: uid-t10"])


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([ready(0, 0), ready(0, 0, name="uid-t7")], "assigned twice"),
        ([closed(0, 2), closed(0, 3)], "assigned twice"),
        ([ready(0, 0, base=-1)], "must be trained at version -1, and policy is at version 0"),
        ([closed(0, 0, base=-1)], "must be trained at version -1, and policy is at version 0"),
        ([ready(0, 0).model_copy(update={"follows": -2})], "after step -2, and policy has trained step -1"),
        ([ready(0, 0, version=1)], "was sampled at version 1, after its base version 0"),
        ([ready(0, 0), ready(0, 1), closed(0, 1)], "has 2 groups, closed with 1"),
    ],
)
def test_a_log_that_contradicts_itself_or_the_version_is_refused(messages, text):
    inbox = StepInbox(-1, 0)
    with pytest.raises(LogInvalid, match=text):
        train(inbox, messages)
