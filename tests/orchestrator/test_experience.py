"""Groups: when they are complete, what each agent of a team has of them, and how difficult their tasks were."""

import pytest
from tests.harness import an_episode

from marlaas_api.messages import GroupOutcome, IssueLedger
from marlaas_worker.orchestrator.experience import Experience, difficulty
from marlaas_worker.orchestrator.job_state import JobState
from marlaas_worker.orchestrator.recorded_totals import History

TEAM = [{"name": "solver"}, {"name": "verifier"}]
SIGNAL, FLAT = GroupOutcome.SIGNAL, GroupOutcome.FLAT
UNCALLED, FAULTED = GroupOutcome.UNCALLED, GroupOutcome.FAULTED


@pytest.mark.parametrize(
    ("solver", "verifier", "outcomes", "hardness"),
    [
        ((1.0, 0.0), (0.5, 0.5), (SIGNAL, FLAT), "varied"),
        ((1.0, 1.0), (0.5, 0.0), (FLAT, SIGNAL), "varied"),
        ((1.0, 0.0), (None, None), (SIGNAL, UNCALLED), "varied"),
        ((1.0, 1.0), (0.5, None), (FLAT, UNCALLED), "solved"),
        ((1.0, 1.0), (0.0, 0.0), (FLAT, FLAT), "hopeless"),
        ((None, None), (None, None), (UNCALLED, UNCALLED), None),
        ((1.0, "fault"), (1.0, "fault"), (FAULTED, FAULTED), None),
    ],
)
def test_each_agent_of_a_team_has_an_outcome_of_its_own(document, solver, verifier, outcomes, hardness):
    """None: the agent has taken no turn in this member."""
    job = document(agents=TEAM)
    store = Experience(job.spec.agents, 2)
    for member in range(2):
        own = {"solver": solver[member], "verifier": verifier[member]}
        if "fault" in own.values():
            ended = {"fault": "env"}
        else:
            rewards = {name: reward for name, reward in own.items() if reward is not None}
            ended = {"rewards": rewards, "leaves": dict.fromkeys(rewards, (0,))}
        group = store.add(an_episode(job, 0, member, **ended))
    parts = group.agents.values()
    assert tuple(part.outcome for part in parts) == outcomes
    assert difficulty(parts, 0.5) == hardness
    spoke = [[member for member, one in enumerate(of) if isinstance(one, float)] for of in (solver, verifier)]
    assert [[one.member for one in part.trajectories] for part in parts] == spoke


def test_a_group_is_complete_when_every_member_has_ended_and_duplicates_change_nothing(document, play):
    job = document(agents=TEAM)
    first, second = play(job, 0, (1.0, 0.0))
    store = Experience(job.spec.agents, 2)
    assert store.add(second) is None
    for attempt in range(1, 100):
        again = {"episode": f"{second.group}-1-{attempt}", "rewards": {"solver": 9.0}, "leaves": {"solver": (7,)}}
        assert store.add(second.model_copy(update=again)) is None
    group = store.add(first.model_copy(update={"ending": "max_turns"}))
    assert len(group.repeats) == 8, "a sandbox may repeat a member for ever"
    assert not any(repeat.leaves for repeat in group.repeats)
    assert list(group.agents) == ["solver", "verifier"]
    for position, part in enumerate(group.agents.values()):
        assert (part.rewards, part.outcome) == ((1.0, 0.0), SIGNAL)
        found = [(one.member, one.leaves, one.ending) for one in part.trajectories]
        assert found == [(0, (position,), "max_turns"), (1, (position,), "completed")]


@pytest.mark.parametrize(
    ("rewards", "outcome", "expected"),
    [
        ((1.0, 0.0), SIGNAL, "varied"),
        ((0.8, 0.8), FLAT, "solved"),
        ((0.5, 0.5), FLAT, "solved"),
        ((0.4, 0.4), FLAT, "hopeless"),
        ((1.0, None), FAULTED, None),
        ((None, None), FAULTED, None),
    ],
)
def test_a_group_says_how_hard_its_task_was_unless_faults_left_nothing_to_say(
    document, play, rewards, outcome, expected
):
    store = Experience(document().spec.agents, 2)
    group = [store.add(episode) for episode in play(document(), 0, rewards)][-1]
    part, num_faults = group.agents["policy"], rewards.count(None)
    assert (part.outcome, len(part.trajectories)) == (outcome, 2 - num_faults)
    assert group.faults.get("env", 0) == num_faults
    assert difficulty([part], 0.5) == expected


def test_a_task_that_comes_again_has_a_group_of_its_own(document, play):
    job = document(data={"tasks": 4, "skip": {}})
    ledger = IssueLedger(namespace="team-a", job="sums", uid=job.uid, next_index=6, open=(5,))
    state = JobState(job, History(ledger=ledger))
    for episode in play(job, 5, (1.0, 0.0)):
        state.add_episode(episode.model_copy(update={"index": 1}))
    (ready,) = state.resolve(state.groups.complete[5], {"policy": 0})
    assert [(one.index, one.visit) for one in state.tasks.outcomes([ready])] == [(1, 5)]
