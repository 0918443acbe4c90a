"""Groups: when they are complete, what trains each agent's policy, how difficult the tasks were, and the past versions that are drawn."""

from typing import Any

import pytest
from tests.harness import an_episode, changed, job_document
from tests.orchestrator.harness import a_job
from tests.tables import rows

from marlaas_api.messages import Choice, GroupOutcome, IssueLedger, PolicyRecord
from marlaas_api.messages.agent_settings import AgentSettings, PolicySettings, RewardShare
from marlaas_api.messages.training_settings import CreditSettings
from marlaas_worker.orchestrator.experience import AgentGroup, CompleteGroup, Experience, difficulty
from marlaas_worker.orchestrator.job_state import JobHistory, JobState

SOLVER, CRITIC = AgentSettings(name="solver"), AgentSettings(name="critic")
SECOND = AgentSettings(name="second", policy=PolicySettings(of="solver"))
PAST = AgentSettings(name="past", policy=PolicySettings(of="solver", versions="past", window=3), trainable=False)
SHARES = (RewardShare(agent="solver", weight=2.0), RewardShare(agent="critic", weight=-0.5))
SHARING = SOLVER.model_copy(update={"reward_from": SHARES})
AGENTS = {"solver": SOLVER, "critic": CRITIC, "second": SECOND, "past": PAST, "sharing": SHARING}
SIGNAL, FLAT, FAULTED = GroupOutcome.SIGNAL, GroupOutcome.FLAT, GroupOutcome.FAULTED


def group_of(agents: tuple[AgentSettings, ...], *ended: dict[str, Any], **settings: Any) -> CompleteGroup:
    store = Experience(agents, len(ended), **settings)
    *_, group = [store.add(an_episode(a_job(), 0, member, **fields)) for member, fields in enumerate(ended)]
    assert group is not None
    return group


def said(rewards: dict[str, float | None]) -> dict[str, Any]:
    """The end of an episode in which the agents with a reward spoke."""
    own = {name: reward for name, reward in rewards.items() if reward is not None}
    return {"rewards": own, "leaves": {name: (position,) for position, name in enumerate(own)}}


@pytest.mark.parametrize(("solver", "critic", "outcomes", "hardness"), rows(__file__, "outcomes"))
def test_each_agent_of_a_team_has_an_outcome_of_its_own(solver, critic, outcomes, hardness):
    """None: the agent has taken no turn in this member."""
    members = [dict(zip(("solver", "critic"), own, strict=True)) for own in zip(solver, critic, strict=True)]
    ended = [{"fault": "env"} if "fault" in own.values() else said(own) for own in members]
    parts = group_of((SOLVER, CRITIC), *ended).agents.values()
    assert [part.outcome for part in parts] == outcomes
    assert difficulty(parts, 0.5) == hardness
    spoke = [[member for member, one in enumerate(of) if isinstance(one, float)] for of in (solver, critic)]
    assert [[one.member for one in part.trajectories] for part in parts] == spoke


def test_a_group_is_complete_when_every_member_has_ended_and_duplicates_change_nothing(document, play):
    job = document(agents=[{"name": "solver"}, {"name": "critic"}])
    first, second = play(job, 0, (1.0, 0.0))
    store = Experience(job.spec.agents, 2)
    assert store.add(second) is None
    for attempt in range(1, 100):
        again = {"episode": f"{second.group}-1-{attempt}", "rewards": {"solver": 9.0}, "leaves": {"solver": (7,)}}
        assert store.add(second.model_copy(update=again)) is None
    group = store.add(first.model_copy(update={"ending": "max_turns"}))
    assert len(group.repeats) == 8, "a sandbox may repeat a member for ever"
    assert not any(repeat.leaves for repeat in group.repeats)
    for position, part in enumerate(group.agents.values()):
        assert (part.rewards, part.outcome) == ((1.0, 0.0), SIGNAL)
        found = [(one.member, one.leaves, one.ending) for one in part.trajectories]
        assert found == [(0, (position,), "max_turns"), (1, (position,), "completed")]


@pytest.mark.parametrize(("agents", "rewards", "outcome", "trained"), rows(__file__, "roles"))
def test_a_policy_is_trained_by_its_roles_and_the_rewards_of_all_are_known(agents, rewards, outcome, trained):
    members = range(max(map(len, rewards.values())))
    own = [{name: values[at] for name, values in rewards.items() if at < len(values)} for at in members]
    part = group_of(tuple(AGENTS[name] for name in agents), *map(said, own)).agents["solver"]
    assert part.outcome == outcome
    if trained is not None:
        assert [[one.agent, one.member, one.reward, [*one.leaves]] for one in part.trajectories] == trained
        assert [*part.rewards] == ([1.0, 0.0] if "sharing" in agents else rewards["solver"])
        assert part.other_rewards == {name: (*rewards[name],) for name in ("second", "past") if name in rewards}


# candidates ---------------------------------------------------------------------------------------------------------


def chosen(rewards: tuple[float, float], *choices: Choice) -> AgentGroup:
    """The part of a group of two whose first member has choices; its conversation ends after turn 7, and candidate 3 is a leaf."""
    first, second = ({"rewards": {"solver": reward}} for reward in rewards)
    first |= {"leaves": {"solver": (3, 7)}, "choices": choices}
    return group_of((SOLVER, SECOND), first, second | {"leaves": {"solver": (0,)}}).agents["solver"]


def test_candidates_are_a_group_of_their_own_and_context_elsewhere():
    part = chosen((1.0, 0.0), Choice(agent="solver", turns=(2, 3), rewards=(5.0, 6.0)))
    assert (part.outcome, part.rewards) == (SIGNAL, (1.0, 0.0))
    found = [(one.member, one.leaves, one.reward, one.untrained, one.choice) for one in part.trajectories]
    of_members = [(0, (3, 7), 1.0, (2, 3), None), (1, (0,), 0.0, (), None)]
    assert found == [*of_members, (0, (2,), 5.0, (), 0), (0, (3,), 6.0, (), 0)]


@pytest.mark.parametrize(("rewards", "own", "choices", "outcome"), rows(__file__, "compared"))
def test_only_what_is_compared_with_different_rewards_is_trained(rewards, own, choices, outcome):
    part = chosen(rewards, Choice(agent="solver", turns=(2, 3), rewards=own))
    assert (part.outcome, [one.choice for one in part.trajectories]) == (outcome, choices)


@pytest.mark.parametrize(("parent", "num_trained"), [(None, 0), (0, 2)], ids=["only candidates", "a turn before them"])
def test_an_episode_in_which_only_candidates_were_said_trains_nothing_itself(parent, num_trained):
    """The turn before a final choice is in the conversations of the candidates only, and is trained with the episode's reward."""
    choice = Choice(agent="solver", turns=(1, 2), rewards=(0.0, 0.0), parent=parent)
    played = {"leaves": {"solver": (1, 2)}, "choices": (choice,)}
    part = group_of((SOLVER,), *({"rewards": {"solver": one}, **played} for one in (1.0, 0.0))).agents["solver"]
    trained = [one for one in part.trajectories if part.outcome is SIGNAL]
    assert [(one.leaves, one.untrained) for one in trained] == [((1, 2), (1, 2))] * num_trained
    assert part.rewards == (1.0, 0.0), "the rewards are reported all the same"


@pytest.mark.parametrize(("credit", "rewards", "turns", "outcome"), rows(__file__, "credited"))
def test_rewards_of_turns_are_signal_where_turns_are_credited(credit, rewards, turns, outcome):
    own = [[{"turn": at, "reward": 2 * reward} for at, reward in enumerate(member)] for member in turns]
    ended = [
        {"rewards": {"solver": 2 * reward}, "leaves": {"solver": (len(mine) - 1,)}, "turn_rewards": {"solver": mine}}
        for reward, mine in zip(rewards, own, strict=True)
    ]
    half = SOLVER.model_copy(update={"reward_from": (RewardShare(agent="solver", weight=0.5),)})
    part = group_of((half,), *ended, credit=CreditSettings(**credit)).agents["solver"]
    assert part.outcome == outcome
    assert [[one.reward for one in member.turn_rewards] for member in part.trajectories] == turns


def test_choices_of_different_episodes_and_states_are_compared_apart():
    choices = [Choice(agent="solver", turns=turns, rewards=(0.0, 1.0)) for turns in ((2, 3), (4, 5))]
    choices.insert(1, Choice(agent="second", turns=(9, 10), rewards=(0.0, 1.0)))
    found = [(one.agent, one.leaves, one.choice) for one in chosen((1.0, 1.0), *choices).trajectories]
    of_solver = [("", (2,), 0), ("", (3,), 0), ("", (4,), 2), ("", (5,), 2)]
    assert found == [*of_solver, ("second", (9,), 1), ("second", (10,), 1)]


@pytest.mark.parametrize(("rewards", "outcome"), [((1.0,), SIGNAL), ((1.0, 1.0), SIGNAL), ((None,), FAULTED)])
def test_with_a_baseline_every_episode_has_signal_and_equal_candidates_are_not_trained(rewards, outcome):
    choice = Choice(agent="solver", turns=(1, 2), rewards=(0.5, 0.5))
    played = {"leaves": {"solver": (3,)}, "choices": (choice,)}
    ended = [{"fault": "env"} if one is None else {"rewards": {"solver": one}, **played} for one in rewards]
    part = group_of((SOLVER,), *ended, needs_no_others=True).agents["solver"]
    assert part.outcome is outcome
    assert [one.choice for one in part.trajectories] == [None] * sum(reward is not None for reward in rewards)


# past versions ------------------------------------------------------------------------------------------------------


def state(newest: int, seed: int = 0, window: int = 3, ledger: IssueLedger | None = None) -> JobState:
    """An asynchronous job whose solver has this version, although no step is on record."""
    past = PAST.model_copy(update={"policy": PolicySettings(of="solver", versions="past", window=window)})
    job = changed(a_job(agents=[{"name": "solver"}], maxStaleness=1), agents=(SOLVER, past))
    policies = {"solver": PolicyRecord(uid=job.uid, version=newest, step=newest - 1)}
    made = JobState(
        job.model_copy(update={"seed": seed}), JobHistory(policies=policies, log=(ledger,) if ledger else ())
    )
    made.assembly.begin(made.versions)
    return made


def drawn_by(played: JobState) -> int:
    played.apply(played.issuing(1, 0))
    return played.tasks.past.versions["past"]


@pytest.mark.parametrize(("newest", "possible"), [(0, {0}), (1, {0}), (2, {0, 1}), (9, {6, 7, 8})])
def test_a_past_version_is_drawn_from_the_window_before_the_newest(newest, possible):
    assert {drawn_by(state(newest, seed)) for seed in range(40)} == possible


def test_a_step_has_one_draw_although_its_newest_version_moves_and_after_a_restart():
    played = state(2, window=1)
    assert drawn_by(played) == 1
    for newest in (3, 4):
        played.policies["solver"] = played.policies["solver"].model_copy(update={"version": newest})
        assert drawn_by(played) == 1
    assert drawn_by(state(5, window=1, ledger=played.ledger())) == 1, "after a restart"
    assert drawn_by(state(5, window=1)) == 4, "another step draws from the versions of its time"


def test_with_a_teacher_one_episode_has_signal_and_candidates_are_turns_as_all_others():
    taught = {"algorithm": "distill", "distillation": {"teacher": "teacher"}, "steps": 1, "groupsPerStep": 1}
    agents = [{"name": "policy"}, {"name": "teacher", "trainable": False}]
    job = job_document(spec={"agents": agents, "rollout": {"groupSize": 1}, "training": taught})
    state = JobState(job, JobHistory())
    state.apply(state.issuing(1, 0))
    choice = Choice(agent="policy", turns=(0, 2), rewards=(0.0, 1.0))
    played = {"leaves": {"policy": (0, 4)}, "choices": (choice,), "may_speak": ("policy",)}
    state.add_episode(an_episode(job, rewards={"policy": 0.0}, **played))
    policy, teacher = state.groups.complete[0].agents.values()
    (trajectory,) = policy.trajectories
    assert (policy.outcome, trajectory.leaves, trajectory.untrained) == (SIGNAL, (0, 4), ())
    assert (teacher.outcome, teacher.rewards) == (GroupOutcome.FROZEN, ())
