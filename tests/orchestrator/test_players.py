"""Agents that play another agent's policy: what trains it, the rewards of each, and the past versions that are drawn."""

from collections import Counter

import pytest
from tests.harness import an_episode
from tests.orchestrator.harness import a_job

from marlaas_api.messages import Choice, Difficulty, GroupOutcome, IssueLedger, JobDocument, PolicyRecord
from marlaas_api.messages.agent_settings import AgentSettings, PolicySettings, RewardShare
from marlaas_worker.orchestrator.experience import AgentGroup, Experience, difficulty
from marlaas_worker.orchestrator.job_state import JobState
from marlaas_worker.orchestrator.recorded_totals import History

SOLVER = AgentSettings(name="solver")
SECOND = AgentSettings(name="second", policy=PolicySettings(of="solver"))
PAST = AgentSettings(name="past", policy=PolicySettings(of="solver", versions="past", window=3), trainable=False)


def grouped(*agents: AgentSettings, rewards: dict[str, tuple[float, ...]]) -> AgentGroup:
    """The solver's part of a group in which an agent spoke in every member for which it has a reward."""
    size = max(map(len, rewards.values()))
    store, job = Experience(agents, size), a_job("sums")
    for member in range(size):
        own = {name: values[member] for name, values in rewards.items() if member < len(values)}
        leaves = {name: (position,) for position, name in enumerate(own)}
        group = store.add(an_episode(job, 0, member, rewards=own, leaves=leaves))
    assert group is not None
    return group.agents["solver"]


def test_both_roles_train_the_policy_and_each_is_compared_with_itself():
    part = grouped(SOLVER, SECOND, rewards={"solver": (1.0, 0.0), "second": (0.0, 5.0)})
    assert part.outcome is GroupOutcome.SIGNAL
    found = [(one.agent, one.member, one.reward, one.leaves) for one in part.trajectories]
    assert found == [("", 0, 1.0, (0,)), ("", 1, 0.0, (0,)), ("second", 0, 0.0, (1,)), ("second", 1, 5.0, (1,))]
    assert (part.rewards, part.other_rewards) == ((1.0, 0.0), {"second": (0.0, 5.0)})


def test_a_role_whose_rewards_are_equal_is_not_trained_and_its_rewards_are_known():
    part = grouped(SOLVER, SECOND, rewards={"solver": (1.0, 1.0), "second": (0.0, 5.0)})
    assert part.outcome is GroupOutcome.SIGNAL
    assert [one.agent for one in part.trajectories] == ["second", "second"]
    assert part.rewards == (1.0, 1.0)


@pytest.mark.parametrize(
    ("rewards", "outcome"),
    [
        ({"solver": (1.0, 1.0), "second": (0.0, 0.0)}, GroupOutcome.FLAT),
        ({"solver": (1.0,), "second": (0.0, 2.0)}, GroupOutcome.SIGNAL),
        ({"solver": (1.0,), "second": (0.0,), "past": (0.0, 1.0)}, GroupOutcome.UNCALLED),
    ],
)
def test_one_role_with_two_different_rewards_is_enough_and_past_versions_never_are(rewards, outcome):
    assert grouped(SOLVER, SECOND, PAST, rewards=rewards).outcome is outcome


def test_turns_of_past_versions_are_never_trained_and_their_rewards_are_known():
    part = grouped(SOLVER, PAST, rewards={"solver": (1.0, 0.0), "past": (0.0, 1.0)})
    assert [one.agent for one in part.trajectories] == ["", ""]
    assert part.other_rewards == {"past": (0.0, 1.0)}


def test_an_agent_is_trained_with_the_weighted_sum_of_rewards():
    shares = (RewardShare(agent="solver", weight=2.0), RewardShare(agent="critic", weight=-0.5))
    solver = SOLVER.model_copy(update={"reward_from": shares})
    part = grouped(solver, AgentSettings(name="critic"), rewards={"solver": (1.0, 1.0), "critic": (4.0, 2.0)})
    assert part.rewards == (0.0, 1.0)
    assert part.outcome is GroupOutcome.SIGNAL, "the sums differ, although the agent's own rewards do not"


def chosen(rewards: tuple[float, float], *choices: Choice) -> AgentGroup:
    """The part of a group of two whose first member has choices; its conversation ends after turn 7, and candidate 3 is a leaf."""
    store, job = Experience((SOLVER, SECOND), 2), a_job("sums")
    first = an_episode(job, 0, 0, rewards={"solver": rewards[0]}, leaves={"solver": (3, 7)}, choices=choices)
    store.add(first)
    group = store.add(an_episode(job, 0, 1, rewards={"solver": rewards[1]}, leaves={"solver": (0,)}))
    assert group is not None
    return group.agents["solver"]


def test_candidates_are_a_group_of_their_own_and_context_elsewhere():
    part = chosen((1.0, 0.0), Choice(agent="solver", turns=(2, 3), rewards=(5.0, 6.0)))
    assert part.outcome is GroupOutcome.SIGNAL
    found = [(one.member, one.leaves, one.reward, one.untrained, one.choice) for one in part.trajectories]
    assert found == [
        (0, (3, 7), 1.0, (2, 3), None),
        (1, (0,), 0.0, (), None),
        (0, (2,), 5.0, (), 0),
        (0, (3,), 6.0, (), 0),
    ]
    assert part.rewards == (1.0, 0.0)


@pytest.mark.parametrize(
    ("rewards", "own", "choices", "outcome"),
    [
        ((1.0, 1.0), (5.0, 6.0), [0, 0], GroupOutcome.SIGNAL),
        ((1.0, 0.0), (5.0, 5.0), [None, None], GroupOutcome.SIGNAL),
        ((1.0, 0.0), (), [None, None], GroupOutcome.SIGNAL),
        ((1.0, 1.0), (5.0, 5.0), [None, None], GroupOutcome.FLAT),
    ],
)
def test_only_what_is_compared_with_different_rewards_is_trained(rewards, own, choices, outcome):
    part = chosen(rewards, Choice(agent="solver", turns=(2, 3), rewards=own))
    assert (part.outcome, [one.choice for one in part.trajectories]) == (outcome, choices)


@pytest.mark.parametrize(
    ("parent", "num_trained"),
    [(None, 0), (0, 2)],
    ids=["nothing else said", "something said before"],
)
def test_an_episode_in_which_only_candidates_were_said_trains_nothing_itself(parent, num_trained):
    """The turn before a final choice is in the conversations of the candidates only, and is trained with the episode's reward."""
    store, job = Experience((SOLVER,), 2), a_job("sums")
    choice = Choice(agent="solver", turns=(1, 2), rewards=(0.0, 0.0), parent=parent)
    for member, reward in enumerate((1.0, 0.0)):
        ended = {"rewards": {"solver": reward}, "leaves": {"solver": (1, 2)}, "choices": (choice,)}
        group = store.add(an_episode(job, 0, member, **ended))
    assert group is not None
    part = group.agents["solver"]
    trained = [one for one in part.trajectories if part.outcome is GroupOutcome.SIGNAL]
    assert [(one.leaves, one.untrained) for one in trained] == [((1, 2), (1, 2))] * num_trained
    assert part.rewards == (1.0, 0.0), "the rewards are reported all the same"


def test_a_task_is_solved_if_every_role_has_the_reward():
    flat = grouped(SOLVER, SECOND, rewards={"solver": (1.0, 1.0), "second": (-1.0, -1.0)})
    assert difficulty([flat], 0.5) is Difficulty.HOPELESS
    solved = grouped(SOLVER, SECOND, rewards={"solver": (1.0, 1.0), "second": (1.0, 1.0)})
    assert difficulty([solved], 0.5) is Difficulty.SOLVED


def test_choices_of_different_episodes_and_states_are_compared_apart():
    choices = [Choice(agent="solver", turns=turns, rewards=(0.0, 1.0)) for turns in ((2, 3), (4, 5))]
    choices.insert(1, Choice(agent="second", turns=(9, 10), rewards=(0.0, 1.0)))
    part = chosen((1.0, 1.0), *choices)
    assert [(one.agent, one.leaves, one.choice) for one in part.trajectories] == [
        ("", (2,), 0),
        ("", (3,), 0),
        ("", (4,), 2),
        ("", (5,), 2),
        ("second", (9,), 1),
        ("second", (10,), 1),
    ]


@pytest.mark.parametrize(
    ("rewards", "outcome"),
    [((1.0,), GroupOutcome.SIGNAL), ((1.0, 1.0), GroupOutcome.SIGNAL), ((None,), GroupOutcome.FAULTED)],
)
def test_with_a_baseline_every_episode_has_signal(rewards, outcome):
    store, job = Experience((SOLVER,), len(rewards), has_baseline=True), a_job("sums")
    for member, reward in enumerate(rewards):
        scored = {"fault": "env"} if reward is None else {"rewards": {"solver": reward}, "leaves": {"solver": (0,)}}
        group = store.add(an_episode(job, 0, member, **{"rewards": {}, "leaves": {}, **scored}))
    assert group is not None
    part = group.agents["solver"]
    assert part.outcome is outcome
    assert len(part.trajectories) == sum(reward is not None for reward in rewards)


def test_with_groups_of_one_the_first_fault_does_not_fail_the_job():
    job = a_job("sums", groupsPerStep=4, baseline={"type": "running-mean"})
    job = job.model_copy(
        update={"spec": job.spec.model_copy(update={"rollout": job.spec.rollout.model_copy(update={"group_size": 1})})}
    )
    played = JobState(job, History())
    played.take_indices(4, 0)
    for index in range(4):
        assert played.faults.verdict() is None
        played.add_episode(an_episode(job, index, 0, fault="env", rewards={}, leaves={}))
    assert "100% of the last 4 episodes" in str(played.faults.verdict())


def test_with_a_baseline_equal_candidates_are_not_trained():
    store, job = Experience((SOLVER,), 1, has_baseline=True), a_job("sums")
    choice = Choice(agent="solver", turns=(1, 2), rewards=(0.5, 0.5))
    group = store.add(an_episode(job, 0, 0, rewards={"solver": 1.0}, leaves={"solver": (3,)}, choices=(choice,)))
    assert group is not None
    assert [one.choice for one in group.agents["solver"].trajectories] == [None]


def state(newest: int, seed: int = 0, window: int = 3, ledger: IssueLedger | None = None) -> JobState:
    """An asynchronous job whose solver has this version, although no step is on record."""
    job: JobDocument = a_job("sums", agents=[{"name": "solver"}], maxStaleness=1)
    past = PAST.model_copy(update={"policy": PolicySettings(of="solver", versions="past", window=window)})
    spec = job.spec.model_copy(update={"agents": (SOLVER, past)})
    job = job.model_copy(update={"spec": spec, "seed": seed})
    policies = {"solver": PolicyRecord(uid=job.uid, version=newest, step=newest - 1)}
    made = JobState(job, History(policies=policies, ledger=ledger))
    made.assembly.begin(made.versions)
    return made


def drawn_by(played: JobState) -> int:
    """The past version that plays in the next group."""
    played.take_indices(1, 0)
    return played.tasks.past.versions["past"]


@pytest.mark.parametrize(("newest", "possible"), [(0, {0}), (1, {0}), (2, {0, 1}), (9, {6, 7, 8})])
def test_a_past_version_is_drawn_from_the_window_before_the_newest(newest, possible):
    assert {drawn_by(state(newest, seed)) for seed in range(40)} == possible


def test_past_versions_are_equally_likely_and_the_same_for_the_same_seed_and_step():
    drawn = Counter(drawn_by(state(8, seed, window=4)) for seed in range(1000))
    assert set(drawn) == {4, 5, 6, 7}
    assert all(200 <= number <= 300 for number in drawn.values())  # 250 expected, standard deviation 13.7
    assert drawn_by(state(8, 5)) == drawn_by(state(8, 5))


def test_a_step_has_one_draw_although_its_newest_version_moves_and_after_a_restart():
    played = state(2, window=1)
    drawn = drawn_by(played)
    assert drawn == 1
    for newest in (3, 4):
        played.policies["solver"] = played.policies["solver"].model_copy(update={"version": newest})
        assert drawn_by(played) == drawn
    assert drawn_by(state(5, window=1, ledger=played.ledger())) == drawn, "after a restart"
    assert drawn_by(state(5, window=1)) == 4, "another step draws from the versions of its time"
