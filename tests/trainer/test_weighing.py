"""Rewards to advantages, against numbers computed by hand."""

import pytest
from tests.trainer.test_trajectories import turn

from marlaas_api.messages import Ending, StopReason, Turn
from marlaas_api.wire import pack_ids, pack_logprobs
from marlaas_worker.trainer.trajectories import Trajectory
from marlaas_worker.trainer.weighing import Weighing


def played(reward: float, *turns: Turn, compared_with: str = "") -> Trajectory:
    leaves = (max(made.turn for made in turns),)
    return Trajectory({made.turn: made for made in turns}, leaves, reward, compared_with=compared_with)


def test_rewards_are_compared_across_all_groups_that_are_given_together():
    one, two = [played(1.0, turn(0)), played(0.0, turn(0))], [played(1.0, turn(0)), played(1.0, turn(0))]
    centred = Weighing("centred", 4, 0)
    apart = [part.advantage for group in (one, two) for part in centred.segments([group])[0]]
    together = [[part.advantage for part in parts] for parts in centred.segments([one, two])]
    assert apart == [0.5, -0.5, 0.0, 0.0]
    assert together == [[0.25, -0.75], [0.25, 0.25]]


@pytest.mark.parametrize("how", ["in a row", "mixed", "apart"])
def test_the_rewards_of_each_agent_are_compared_with_its_own_mean_and_deviation(how):
    """Rewards 1, 0, 0 have mean 1/3 and deviation sqrt(2)/3; 10, 20, 30 have mean 20 and deviation 10 sqrt(2/3): Dr. MAS."""
    first = [played(reward, turn(0)) for reward in (1.0, 0.0, 0.0)]
    second = [played(reward, turn(0), compared_with="second") for reward in (10.0, 20.0, 30.0)]
    mixed = [member for pair in zip(first, second, strict=True) for member in pair]
    groups = {"in a row": [[*first, *second]], "mixed": [mixed], "apart": [first, second]}[how]
    weighed = [Weighing("standardised", 4, 0).segments([group])[0] for group in groups]
    found = [part.advantage for parts in weighed for part in parts]
    if how == "mixed":
        found = [*found[::2], *found[1::2]]
    assert found == pytest.approx([2**0.5, -(0.5**0.5), -(0.5**0.5), -(1.5**0.5), 0.0, 1.5**0.5], abs=1e-5)


def test_every_segment_has_its_trajectorys_advantage_and_knows_how_many_tokens_it_generated():
    rewritten = Trajectory({0: turn(0), 1: turn(1, 0), 2: turn(2, 1, opens=True)}, (2,), 1.0)
    (parts,) = Weighing("centred", 4, 0).segments([[rewritten, played(0.0, turn(0))]])
    assert [int(part.generated.sum()) for part in parts] == [4, 2, 2]
    assert [part.num_trajectory_tokens for part in parts] == [6, 6, 2]
    assert [part.trajectory for part in parts] == [0, 0, 1]
    assert [part.advantage for part in parts] == [0.5, 0.5, -0.5]


LONG = {"stop_reason": StopReason.LENGTH}


@pytest.mark.parametrize(
    ("member", "is_truncated"),
    [
        (played(0.0, turn(0), turn(1, 0)), False),
        (played(0.0, turn(0, **LONG), turn(1, 0)), False),  # cut off, and the conversation went on
        (played(0.0, turn(0), turn(1, 0, **LONG)), True),
        (played(0.0, turn(0), turn(1, 0, stop_reason=StopReason.CONTEXT)), True),
        (Trajectory({0: turn(0), 1: turn(1, 0, **LONG), 2: turn(2, 0)}, (1, 2), 0.0), True),  # one of two conversations
        (Trajectory({0: turn(0)}, (0,), 0.0, Ending.MAX_TURNS), True),
        (Trajectory({0: turn(0)}, (0,), 0.0, Ending.TOOL_ERROR), False),
        (Trajectory({}, (), 0.0), False),
    ],
)
def test_an_episode_is_truncated_when_a_limit_ended_it(member, is_truncated):
    assert member.is_truncated == is_truncated


def test_the_overlong_filter_leaves_truncated_episodes_out_and_compares_their_rewards_all_the_same():
    group = [played(1.0, turn(0)), played(0.0, turn(0, **LONG)), played(0.0, turn(0))]
    (kept,) = Weighing("leave-one-out", 4, 0, filter_overlong=True).segments([group])
    (every,) = Weighing("leave-one-out", 4, 0).segments([group])
    assert [part.advantage for part in every] == [1.0, -0.5, -0.5]
    assert [(part.advantage, part.trajectory) for part in kept] == [(1.0, 0), (-0.5, 2)]


def test_a_turn_near_the_bound_costs_reward_however_short_the_others():
    long = turn(1, 0, output_ids=pack_ids([1, 2, 3]), logprobs=pack_logprobs([-1.0, -1.0, -1.0]))
    group = [played(1.0, turn(0), long), played(1.0, turn(0), turn(1, 0))]
    (parts,) = Weighing("centred", max_tokens=4, overlong_tokens=2).segments([group])
    assert [part.advantage for part in parts] == [-0.25, 0.25]  # rewards 1 - 1/2 and 1
