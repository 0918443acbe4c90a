import math
import random

import pytest
from tests.harness import a_step, job_document
from tests.tables import rows

from marlaas.episodes.record import joined
from marlaas.episodes.selection import (
    Comparison,
    EpisodeFilter,
    EpisodeOrder,
    JobContext,
    chosen,
    comparison_of,
    placed,
)
from marlaas_api.messages import Choice, FaultClass
from marlaas_api.messages.agent_settings import AgentSettings, PolicySettings, RewardShare
from marlaas_api.names import Split, eval_group
from marlaas_api.wire import pack_ids

REVERSE = job_document("reverse", uid="uid-1")
POLICY = AgentSettings(name="policy")
CENTRED = Comparison("centred")


def _step(number, *indices: int):
    return a_step(REVERSE, number, indices=indices)


@pytest.fixture
def around(ref):
    return JobContext("team-a/reverse", 2, CENTRED, (_step(0, 0, 2), _step(1, 1)), (POLICY,))


@pytest.fixture
def records(ref, episode, turn):
    """Two groups of two, one of them with a fault, and a held-out episode; they end in this order."""
    fault = episode(1, 1, fault=FaultClass.ENV, fault_text="boom", rewards={})
    held_out = episode(7, 0, 0.25, split=Split.EVAL, group=eval_group(ref, 7, 3))
    episodes = [episode(0, 0, 1.0), episode(0, 1, 0.0), episode(1, 0, 0.5), fault, held_out]
    return [joined(one, [turn(one, at=10.0 + at)]) for at, one in enumerate(episodes)]


def test_an_episode_knows_its_step_and_its_advantage_once_the_group_is_whole(records, around):
    all_placed = placed(records, around)
    assert [one.step for one in all_placed] == [0, 0, 1, 1, None]
    assert [dict(one.advantages) for one in all_placed] == [{"policy": 0.5}, {"policy": -0.5}, {}, {}, {}]
    assert all_placed[0].group_rewards == {"policy": (1.0, 0.0)}
    assert [dict(one.advantages) for one in placed(records[:1], around)] == [{}]


@pytest.mark.parametrize(("choice", "indices"), rows(__file__, "filters"))
def test_the_wanted_ones_come_in_the_wanted_order(records, around, choice, indices):
    kinds = {"order": EpisodeOrder, "split": Split}
    wanted = EpisodeFilter(**{name: kinds.get(name, type(value))(value) for name, value in choice.items()})
    found = chosen(placed(records, around), wanted, random.Random(0))
    assert [[one.record.index, one.record.member] for one in found] == indices


def _spec(algorithm, **training: object):
    own = {"steps": 3, "algorithm": algorithm, **training}
    return job_document(spec={"rollout": {"maxTokens": 10}, "training": own}).spec


@pytest.fixture
def members(episode, turn):
    """Rewards 1 and 0; the first one's longest turn has 3 tokens, the second one's 10."""
    plays = [episode(0, 0, 1.0), episode(0, 1, 0.0)]
    ids = [[1, 2, 3], list(range(10))]
    return [joined(one, [turn(one, output_ids=pack_ids(own))]) for one, own in zip(plays, ids, strict=True)]


def test_an_advantage_is_the_trainers_own_also_of_an_overlong_reply(members):
    assert comparison_of(_spec("grpo")).of_members(members, POLICY, None) == pytest.approx([1.0, -1.0], abs=1e-5)
    assert comparison_of(_spec("dr-grpo")).of_members(members, POLICY, None) == [0.5, -0.5]
    assert comparison_of(_spec("rloo")).of_members(members, POLICY, None) == [1.0, -1.0]
    third = members[0].model_copy(update={"rewards": {"policy": 0.0}})
    found = comparison_of(_spec("dapo", overlong={"tokens": 4})).of_members([*members, third], POLICY, None)
    assert found == pytest.approx([reward / math.sqrt(2 / 3) for reward in (1.0, -1.0, 0.0)], abs=1e-5)


def test_with_a_running_mean_an_advantage_is_the_difference_to_the_mean_before_the_step(episode, turn):
    """The metrics of a step have the mean after it; a step that trains nothing changes none, and groups may have one member."""
    agents = [
        AgentSettings(name="a"),
        AgentSettings(name="second", policy=PolicySettings(of="a")),
        AgentSettings(name="b"),
    ]
    means = [{"a/baseline": 0.5, "a/baseline_second": -0.25, "b/baseline": 2.0}, {}, {"a/baseline": 9.0}]
    steps = [_step(number, number).model_copy(update={"metrics": own}) for number, own in enumerate(means)]
    records = []
    for index in range(4):
        one = episode(index, 0, rewards={"a": 1.0, "second": 1.0, "b": 1.0})
        records.append(joined(one, [turn(one, number, agent=agent.name) for number, agent in enumerate(agents)]))
    spec = _spec("grpo", baseline={"type": "running-mean"})
    found = placed(records, JobContext("team-a/reverse", 1, comparison_of(spec), steps, agents))
    later = {"a": 0.5, "second": 1.25, "b": -1.0}
    assert [dict(one.advantages) for one in found] == [{"a": 1.0, "second": 1.0, "b": 1.0}, later, later, {}]
    alone = [AgentSettings(name="a")]
    steps = [_step(number, number).model_copy(update={"metrics": {"baseline": 0.25}}) for number in range(2)]
    found = placed(records[:2], JobContext("team-a/reverse", 1, comparison_of(spec), steps, alone))
    assert [dict(one.advantages) for one in found] == [{"a": 1.0}, {"a": 0.75}]


def test_candidates_are_compared_with_each_other_and_an_episode_of_nothing_else_has_no_advantage(ref, episode, turn):
    choices = (
        Choice(agent="policy", turns=(1, 2), rewards=(1.0, 0.0)),
        Choice(agent="judge", turns=(3,), rewards=(1.0,)),
    )
    one, other = episode(0, 0, 1.0, choices=choices), episode(0, 1, 0.0)
    last = episode(1, 0, 1.0, choices=choices[:1])
    records = [
        joined(one, [turn(one, number) for number in range(3)]),
        joined(other, [turn(other)]),
        *(
            joined(each, [turn(each, number) for number in (1, 2)])
            for each in (last, episode(1, 1, 0.0, choices=choices[:1]))
        ),
    ]
    found = placed(records, JobContext("team-a/reverse", 2, CENTRED, (), (POLICY,)))
    assert [dict(each.advantages) for each in found] == [{"policy": 0.5}, {"policy": -0.5}, {}, {}]
    assert [dict(each.candidates) for each in found[:2]] == [{("policy", 1): 0.5, ("policy", 2): -0.5}, {}]
    held_out = records[0].model_copy(update={"split": Split.EVAL})
    assert placed([held_out], JobContext("team-a/reverse", 1, CENTRED, (), (POLICY,)))[0].candidates == {}


def test_agents_are_compared_where_they_spoke_with_the_rewards_that_train_them(ref, episode, turn, around):
    """Agent b spoke in one episode only; a is trained with both rewards; the opponent's turns are not trained."""
    played = PolicySettings(of="a", versions="past")
    shares = (RewardShare(agent="a"), RewardShare(agent="b", weight=2.0))
    agents = [
        AgentSettings(name="a", reward_from=shares),
        AgentSettings(name="b"),
        AgentSettings(name="old", policy=played, trainable=False),
    ]
    plays = [episode(0, member, rewards={"a": 1.0, "b": float(member), "old": member}) for member in (0, 1)]
    spoken = [["a", "old"], ["a", "b", "old"]]
    records = [
        joined(one, [turn(one, number, agent=name) for number, name in enumerate(names)])
        for one, names in zip(plays, spoken, strict=True)
    ]
    spec = _spec("dr-grpo")
    found = placed(records, JobContext("team-a/reverse", 2, comparison_of(spec), (), agents))
    assert [dict(one.advantages) for one in found] == [{"a": -1.0}, {"a": 1.0}]
