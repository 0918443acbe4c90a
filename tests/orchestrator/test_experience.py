import pytest
from tests.harness import an_episode

from marlaas_api.messages import GroupOutcome, IssueLedger
from marlaas_api.messages.agent_settings import AgentSettings
from marlaas_worker.orchestrator.experience import Experience, difficulty
from marlaas_worker.orchestrator.job_state import JobState
from marlaas_worker.orchestrator.recorded_totals import History

ONE = (AgentSettings(name="policy"),)
TEAM = [{"name": "solver"}, {"name": "verifier"}]


def test_a_group_is_complete_for_each_agent_when_every_member_has_ended_in_any_order(document, play):
    job = document(agents=TEAM)
    first, second = play(job, 0, (1.0, 0.0))
    store = Experience(job.spec.agents, 2)
    assert store.add(second) is None
    group = store.add(first)
    assert list(group.agents) == ["solver", "verifier"]
    for position, part in enumerate(group.agents.values()):
        assert (part.rewards, part.outcome) == ((1.0, 0.0), GroupOutcome.SIGNAL)
        assert [(one.member, one.leaves) for one in part.trajectories] == [(0, (position,)), (1, (position,))]


SIGNAL, FLAT, UNCALLED, FAULTED = (
    GroupOutcome.SIGNAL,
    GroupOutcome.FLAT,
    GroupOutcome.UNCALLED,
    GroupOutcome.FAULTED,
)


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


def test_a_group_says_of_each_episode_how_it_ended(document, play):
    first, second = play(document(), 0, (1.0, 0.0))
    store = Experience(ONE, 2)
    store.add(first.model_copy(update={"ending": "max_turns"}))
    group = store.add(second)
    assert [member.ending for member in group.agents["policy"].trajectories] == ["max_turns", "completed"]


def test_a_duplicate_of_a_member_completes_nothing_and_changes_nothing(document, play):
    job = document(agents=TEAM)
    first, second = play(job, 0, (1.0, 0.0))
    store = Experience(job.spec.agents, 2)
    assert store.add(first) is None
    for attempt in range(1, 100):
        again = {"episode": f"{first.group}-0-{attempt}", "rewards": {"solver": 9.0}, "leaves": {"solver": (7,)}}
        assert store.add(first.model_copy(update=again)) is None
    group = store.add(second)
    assert len(group.repeats) == 8, "a sandbox may repeat a member for ever"
    assert not any(repeat.leaves for repeat in group.repeats)
    for position, part in enumerate(group.agents.values()):
        assert part.rewards == (1.0, 0.0)
        assert [one.leaves for one in part.trajectories] == [(position,)] * 2


@pytest.mark.parametrize(
    ("rewards", "outcome", "kept"),
    [
        ((1.0, 1.0), GroupOutcome.FLAT, 2),
        ((1.0, None), GroupOutcome.FAULTED, 1),
        ((None, None), GroupOutcome.FAULTED, 0),
    ],
)
def test_groups_without_signal_say_why(document, play, rewards, outcome, kept):
    store = Experience(ONE, 2)
    group = [store.add(episode) for episode in play(document(), 0, rewards)][-1]
    assert group.agents["policy"].outcome is outcome
    assert len(group.agents["policy"].trajectories) == kept
    assert group.faults.get("env", 0) == 2 - kept


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((1.0, 0.0), "varied"),
        ((0.8, 0.8), "solved"),
        ((0.5, 0.5), "solved"),
        ((0.4, 0.4), "hopeless"),
        ((0.0, 0.0), "hopeless"),
        ((1.0, None), None),
    ],
)
def test_a_group_says_how_hard_its_task_was_unless_faults_left_nothing_to_say(document, play, rewards, expected):
    store = Experience(ONE, 2)
    group = [store.add(episode) for episode in play(document(), 0, rewards)][-1]
    assert difficulty(group.agents.values(), 0.5) == expected


def test_a_task_that_comes_again_has_a_group_of_its_own(document, play):
    job = document(data={"tasks": 4, "skip": {}})
    state = JobState(
        job, History(ledger=IssueLedger(namespace="team-a", job="sums", uid=job.uid, next_index=6, open=(5,)))
    )
    for episode in play(job, 5, (1.0, 0.0)):
        state.add_episode(episode.model_copy(update={"index": 1}))
    (ready,) = state.resolve(state.groups.complete[5], {"policy": 0})
    assert [(one.index, one.visit) for one in state.tasks.outcomes([ready])] == [(1, 5)]
