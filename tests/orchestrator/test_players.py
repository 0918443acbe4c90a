"""Agents that play another agent's policy: what trains it, the rewards of each, and the past versions that are drawn."""

from collections import Counter

import pytest
from tests.harness import an_episode, changed
from tests.orchestrator.harness import a_job

from marlaas_api.messages import Choice, Difficulty, GroupOutcome, IssueLedger, PolicyRecord
from marlaas_api.messages.agent_settings import AgentSettings, PolicySettings, RewardShare
from marlaas_worker.orchestrator.experience import AgentGroup, Experience, difficulty
from marlaas_worker.orchestrator.job_state import JobState
from marlaas_worker.orchestrator.recorded_totals import History

SOLVER = AgentSettings(name="solver")
SECOND = AgentSettings(name="second", policy=PolicySettings(of="solver"))
PAST = AgentSettings(name="past", policy=PolicySettings(of="solver", versions="past", window=3), trainable=False)
SHARES = (RewardShare(agent="solver", weight=2.0), RewardShare(agent="critic", weight=-0.5))
SHARING = SOLVER.model_copy(update={"reward_from": SHARES})
CRITIC = AgentSettings(name="critic")
SIGNAL, FLAT, UNCALLED = GroupOutcome.SIGNAL, GroupOutcome.FLAT, GroupOutcome.UNCALLED


def grouped(agents: tuple[AgentSettings, ...], rewards: dict[str, tuple[float, ...]]) -> AgentGroup:
    """The solver's part of a group in which an agent spoke in every member for which it has a reward."""
    size = max(map(len, rewards.values()))
    store, job = Experience(agents, size), a_job("sums")
    for member in range(size):
        own = {name: values[member] for name, values in rewards.items() if member < len(values)}
        leaves = {name: (position,) for position, name in enumerate(own)}
        group = store.add(an_episode(job, 0, member, rewards=own, leaves=leaves))
    return group.agents["solver"]


@pytest.mark.parametrize(
    ("agents", "rewards", "outcome", "trained"),
    [
        (
            (SOLVER, SECOND),
            {"solver": (1.0, 0.0), "second": (0.0, 5.0)},
            SIGNAL,
            [("", 0, 1.0, (0,)), ("", 1, 0.0, (0,)), ("second", 0, 0.0, (1,)), ("second", 1, 5.0, (1,))],
        ),
        (
            (SOLVER, SECOND),
            {"solver": (1.0, 1.0), "second": (0.0, 5.0)},
            SIGNAL,
            [("second", 0, 0.0, (1,)), ("second", 1, 5.0, (1,))],
        ),
        (
            (SOLVER, PAST),
            {"solver": (1.0, 0.0), "past": (0.0, 1.0)},
            SIGNAL,
            [("", 0, 1.0, (0,)), ("", 1, 0.0, (0,))],
        ),
        (
            (SHARING, CRITIC),
            {"solver": (1.0, 1.0), "critic": (4.0, 2.0)},
            SIGNAL,
            [("", 0, 0.0, (0,)), ("", 1, 1.0, (0,))],
        ),
        ((SOLVER, SECOND, PAST), {"solver": (1.0, 1.0), "second": (0.0, 0.0)}, FLAT, None),
        ((SOLVER, SECOND, PAST), {"solver": (1.0,), "second": (0.0, 2.0)}, SIGNAL, None),
        ((SOLVER, SECOND, PAST), {"solver": (1.0,), "second": (0.0,), "past": (0.0, 1.0)}, UNCALLED, None),
    ],
    ids=[
        "each role is compared with itself",
        "a role with equal rewards is not trained",
        "turns of past versions are not trained",
        "a weighted sum of rewards",
        "no role has two rewards that differ",
        "one role with two rewards is enough",
        "past versions never are",
    ],
)
def test_a_policy_is_trained_by_its_roles_and_the_rewards_of_all_are_known(agents, rewards, outcome, trained):
    part = grouped(agents, rewards)
    assert part.outcome is outcome
    found = [(one.agent, one.member, one.reward, one.leaves) for one in part.trajectories]
    if trained is None:
        return
    assert found == trained
    own = (0.0, 1.0) if SHARING in agents else rewards["solver"]
    others = {name: rewards[name] for name in ("second", "past") if name in rewards}
    assert (part.rewards, part.other_rewards) == (own, others)


def test_a_task_is_solved_if_every_role_has_the_reward():
    for second, expected in ((-1.0, Difficulty.HOPELESS), (1.0, Difficulty.SOLVED)):
        part = grouped((SOLVER, SECOND), {"solver": (1.0, 1.0), "second": (second, second)})
        assert difficulty([part], 0.5) is expected


def chosen(rewards: tuple[float, float], *choices: Choice) -> AgentGroup:
    """The part of a group of two whose first member has choices; its conversation ends after turn 7, and candidate 3 is a leaf."""
    store, job = Experience((SOLVER, SECOND), 2), a_job("sums")
    first = an_episode(job, 0, 0, rewards={"solver": rewards[0]}, leaves={"solver": (3, 7)}, choices=choices)
    store.add(first)
    return store.add(an_episode(job, 0, 1, rewards={"solver": rewards[1]}, leaves={"solver": (0,)})).agents["solver"]


def test_candidates_are_a_group_of_their_own_and_context_elsewhere():
    part = chosen((1.0, 0.0), Choice(agent="solver", turns=(2, 3), rewards=(5.0, 6.0)))
    assert (part.outcome, part.rewards) == (SIGNAL, (1.0, 0.0))
    found = [(one.member, one.leaves, one.reward, one.untrained, one.choice) for one in part.trajectories]
    of_members = [(0, (3, 7), 1.0, (2, 3), None), (1, (0,), 0.0, (), None)]
    assert found == [*of_members, (0, (2,), 5.0, (), 0), (0, (3,), 6.0, (), 0)]


@pytest.mark.parametrize(
    ("rewards", "own", "choices", "outcome"),
    [
        ((1.0, 1.0), (5.0, 6.0), [0, 0], SIGNAL),
        ((1.0, 0.0), (5.0, 5.0), [None, None], SIGNAL),
        ((1.0, 0.0), (), [None, None], SIGNAL),
        ((1.0, 1.0), (5.0, 5.0), [None, None], FLAT),
    ],
)
def test_only_what_is_compared_with_different_rewards_is_trained(rewards, own, choices, outcome):
    part = chosen(rewards, Choice(agent="solver", turns=(2, 3), rewards=own))
    assert (part.outcome, [one.choice for one in part.trajectories]) == (outcome, choices)


@pytest.mark.parametrize(("parent", "num_trained"), [(None, 0), (0, 2)], ids=["only candidates", "a turn before them"])
def test_an_episode_in_which_only_candidates_were_said_trains_nothing_itself(parent, num_trained):
    """The turn before a final choice is in the conversations of the candidates only, and is trained with the episode's reward."""
    store, job = Experience((SOLVER,), 2), a_job("sums")
    choice = Choice(agent="solver", turns=(1, 2), rewards=(0.0, 0.0), parent=parent)
    for member, reward in enumerate((1.0, 0.0)):
        ended = {"rewards": {"solver": reward}, "leaves": {"solver": (1, 2)}, "choices": (choice,)}
        group = store.add(an_episode(job, 0, member, **ended))
    part = group.agents["solver"]
    trained = [one for one in part.trajectories if part.outcome is SIGNAL]
    assert [(one.leaves, one.untrained) for one in trained] == [((1, 2), (1, 2))] * num_trained
    assert part.rewards == (1.0, 0.0), "the rewards are reported all the same"


def test_choices_of_different_episodes_and_states_are_compared_apart():
    choices = [Choice(agent="solver", turns=turns, rewards=(0.0, 1.0)) for turns in ((2, 3), (4, 5))]
    choices.insert(1, Choice(agent="second", turns=(9, 10), rewards=(0.0, 1.0)))
    found = [(one.agent, one.leaves, one.choice) for one in chosen((1.0, 1.0), *choices).trajectories]
    of_solver = [("", (2,), 0), ("", (3,), 0), ("", (4,), 2), ("", (5,), 2)]
    assert found == [*of_solver, ("second", (9,), 1), ("second", (10,), 1)]


@pytest.mark.parametrize(
    ("rewards", "outcome"), [((1.0,), SIGNAL), ((1.0, 1.0), SIGNAL), ((None,), GroupOutcome.FAULTED)]
)
def test_with_a_baseline_every_episode_has_signal_and_equal_candidates_are_not_trained(rewards, outcome):
    store, job = Experience((SOLVER,), len(rewards), has_baseline=True), a_job("sums")
    choice = Choice(agent="solver", turns=(1, 2), rewards=(0.5, 0.5))
    scored = {"leaves": {"solver": (3,)}, "choices": (choice,)}
    for member, reward in enumerate(rewards):
        ended = {"fault": "env"} if reward is None else {"rewards": {"solver": reward}, **scored}
        group = store.add(an_episode(job, 0, member, **ended))
    part = group.agents["solver"]
    assert part.outcome is outcome
    assert [one.choice for one in part.trajectories] == [None] * sum(reward is not None for reward in rewards)


def test_with_groups_of_one_the_first_fault_does_not_fail_the_job():
    job = a_job("sums", groupsPerStep=4, baseline={"type": "running-mean"})
    played = JobState(changed(job, rollout=job.spec.rollout.model_copy(update={"group_size": 1})), History())
    played.take_indices(4, 0)
    for index in range(4):
        assert played.faults.verdict() is None
        played.add_episode(an_episode(job, index, 0, fault="env"))
    assert "100% of the last 4 episodes" in str(played.faults.verdict())


def state(newest: int, seed: int = 0, window: int = 3, ledger: IssueLedger | None = None) -> JobState:
    """An asynchronous job whose solver has this version, although no step is on record."""
    past = PAST.model_copy(update={"policy": PolicySettings(of="solver", versions="past", window=window)})
    job = changed(a_job("sums", agents=[{"name": "solver"}], maxStaleness=1), agents=(SOLVER, past))
    policies = {"solver": PolicyRecord(uid=job.uid, version=newest, step=newest - 1)}
    made = JobState(job.model_copy(update={"seed": seed}), History(policies=policies, ledger=ledger))
    made.assembly.begin(made.versions)
    return made


def drawn_by(played: JobState) -> int:
    """The past version that plays in the next group."""
    played.take_indices(1, 0)
    return played.tasks.past.versions["past"]


@pytest.mark.parametrize(("newest", "possible"), [(0, {0}), (1, {0}), (2, {0, 1}), (9, {6, 7, 8})])
def test_a_past_version_is_drawn_from_the_window_before_the_newest(newest, possible):
    assert {drawn_by(state(newest, seed)) for seed in range(40)} == possible


def test_past_versions_are_equally_likely():
    drawn = Counter(drawn_by(state(8, seed, window=4)) for seed in range(1000))
    assert set(drawn) == {4, 5, 6, 7}
    assert all(200 <= number <= 300 for number in drawn.values())  # 250 expected, standard deviation 13.7


def test_a_step_has_one_draw_although_its_newest_version_moves_and_after_a_restart():
    played = state(2, window=1)
    drawn = drawn_by(played)
    assert drawn == 1
    for newest in (3, 4):
        played.policies["solver"] = played.policies["solver"].model_copy(update={"version": newest})
        assert drawn_by(played) == drawn
    assert drawn_by(state(5, window=1, ledger=played.ledger())) == drawn, "after a restart"
    assert drawn_by(state(5, window=1)) == 4, "another step draws from the versions of its time"
