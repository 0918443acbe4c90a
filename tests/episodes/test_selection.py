import random

import pytest

from marlaas.episodes.record import joined
from marlaas.episodes.selection import EpisodeFilter, EpisodeOrder, JobContext, chosen, placed
from marlaas_api.messages import FaultClass, StepOutcome, StepRecord
from marlaas_api.names import Split, eval_group


def _step(ref, number: int, *indices: int) -> StepRecord:
    body = {"namespace": ref.namespace, "job": ref.name, "uid": ref.uid, "step": number, "version": number + 1}
    figures = {"at": 1.0, "wall_s": 1.0, "reward_mean": 0.5, "reward_std": 0.5, "num_groups": 1, "num_episodes": 2}
    return StepRecord(**body, **figures, outcome=StepOutcome.COMMITTED, indices=indices)


def _centred(members, agent):
    rewards = [one.rewards[agent] for one in members]
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


@pytest.fixture
def around(ref):
    return JobContext("team-a/reverse", 2, (_step(ref, 0, 0, 2), _step(ref, 1, 1)), _centred)


@pytest.fixture
def records(episode, turn):
    """Two groups of two, one of them with a fault, and a held-out episode; they end in this order."""
    fault = {"fault": FaultClass.ENV, "fault_text": "boom", "rewards": {}}
    held_out = {"split": Split.EVAL, "group": eval_group_name}
    episodes = [
        episode(0, 0, 1.0),
        episode(0, 1, 0.0),
        episode(1, 0, 0.5),
        episode(1, 1, **fault),
        episode(7, 0, 0.25, **held_out),
    ]
    return [joined(one, [turn(one, at=10.0 + at)]) for at, one in enumerate(episodes)]


eval_group_name = "uid-1-e7v3"


def test_an_episode_knows_its_step_and_its_advantage_once_the_group_is_whole(records, around):
    all_placed = placed(records, around)
    assert [one.step for one in all_placed] == [0, 0, 1, 1, None]
    assert [dict(one.advantages) for one in all_placed] == [{"policy": 0.5}, {"policy": -0.5}, {}, {}, {}]
    assert all_placed[0].group_rewards == {"policy": (1.0, 0.0)}
    assert [dict(one.advantages) for one in placed(records[:1], around)] == [{}]


def test_a_held_out_group_is_named_as_in_the_records(ref):
    assert eval_group(ref, 7, 3) == eval_group_name


@pytest.mark.parametrize(
    ("choice", "indices"),
    [
        (EpisodeFilter(limit=2), [(1, 1), (7, 0)]),
        (EpisodeFilter(order=EpisodeOrder.WORST, limit=3), [(0, 1), (7, 0), (1, 0)]),
        (EpisodeFilter(order=EpisodeOrder.BEST, limit=2), [(0, 0), (1, 0)]),
        (EpisodeFilter(order=EpisodeOrder.WORST, limit=9), [(0, 1), (7, 0), (1, 0), (0, 0), (1, 1)]),
        (EpisodeFilter(step=1), [(1, 0), (1, 1)]),
        (EpisodeFilter(split=Split.EVAL), [(7, 0)]),
        (EpisodeFilter(split=Split.TRAIN, step=0), [(0, 0), (0, 1)]),
        (EpisodeFilter(faults=True), [(1, 1)]),
        (EpisodeFilter(limit=0, order=EpisodeOrder.BEST), []),
    ],
)
def test_the_wanted_ones_come_in_the_wanted_order(records, around, choice, indices):
    found = chosen(placed(records, around), choice, random.Random(0))
    assert [(one.record.index, one.record.member) for one in found] == indices


def test_random_ones_are_drawn_from_all_and_differ_by_the_draw(records, around):
    draws = {
        chosen(placed(records, around), EpisodeFilter(order=EpisodeOrder.RANDOM, limit=1), random.Random(seed))[
            0
        ].record.episode
        for seed in range(40)
    }
    assert draws == {record.episode for record in records}


def test_the_latest_zero_are_none(records, around):
    assert chosen(placed(records, around), EpisodeFilter(limit=0), random.Random(0)) == []
