import pytest

from marlaas_worker.orchestrator.experience import Experience, Verdict


def test_a_group_is_complete_when_every_member_has_ended_in_any_order(document, play):
    first, second = play(document(), 0, (1.0, 0.0))
    store = Experience("policy", 2)
    assert store.add(second) is None
    group = store.add(first)
    assert group is not None
    assert group.rewards == (1.0, 0.0)
    assert group.verdict is Verdict.SIGNAL


def test_a_duplicate_of_a_member_completes_nothing_and_changes_nothing(document, play):
    first, second = play(document(), 0, (1.0, 0.0))
    store = Experience("policy", 2)
    assert store.add(first) is None
    assert store.add(first.model_copy(update={"rewards": {"policy": 9.0}})) is None
    group = store.add(second)
    assert group is not None
    assert group.rewards == (1.0, 0.0)


@pytest.mark.parametrize(
    ("rewards", "verdict", "kept"),
    [((1.0, 1.0), Verdict.FLAT, 2), ((1.0, None), Verdict.FAULTED, 1), ((None, None), Verdict.FAULTED, 0)],
)
def test_groups_without_signal_say_why(document, play, rewards, verdict, kept):
    store = Experience("policy", 2)
    group = [store.add(episode) for episode in play(document(), 0, rewards)][-1]
    assert group is not None
    assert group.verdict is verdict
    assert len(group.trajectories) == kept
    assert group.faults.get("env", 0) == 2 - kept
