"""Turns to segments: every generated token once, in its context, and nothing that contradicts itself; and rewards to advantages."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness import a_turn
from tests.tables import rows

from marlaas_api import wire
from marlaas_api.messages import Ending, GroupReady, StopReason, TrajectoryRef, Turn, TurnReward
from marlaas_api.messages.training_settings import BaselineSettings, CreditSettings
from marlaas_api.names import BRANCH_TURNS, SCORES
from marlaas_api.wire import pack_ids, pack_logprobs
from marlaas_worker.trainer import trajectories
from marlaas_worker.trainer.trajectories import Expectation, Trajectory, TrajectoryInvalid, check_turn, read_group
from marlaas_worker.trainer.weighing import Baselines, Weighing, rows_of_groups, segments_of

IDS = {"uid": "uid", "group": "uid-t0", "episode": "uid-t0-0-1"}
EXPECTED = Expectation(1.0, 1000, {4: "a" * 64})
SECOND = {"member": 1, "episode": "uid-t0-1-1"}
GRPO = Weighing("standardised", max_tokens=4, overlong_tokens=0)


def turn(number, parent=None, *, opens=None, **changes: Any):
    """Turn n appends ids 10n, 10n + 1 and generates 10n + 5, 10n + 6 with logprobs -n - .5, -n - .6."""
    tokens = {"prompt_ids": pack_ids([10 * number, 10 * number + 1])}
    tokens |= {"output_ids": pack_ids([10 * number + 5, 10 * number + 6])}
    tokens |= {"logprobs": pack_logprobs([-number - 0.5, -number - 0.6]), "adapter_sha256": "a" * 64}
    opens = parent is None if opens is None else opens
    return a_turn(number, parent, **{**IDS, "version": 4, "opens_segment": opens, **tokens, **changes})


def group(*leaves: tuple[int, ...]):
    refs = tuple(
        TrajectoryRef(member=member, episode=f"uid-t0-{member}-1", leaves=leaf, reward=float(member))
        for member, leaf in enumerate(leaves)
    )
    place = {"agent": "policy", "step": 0, "position": 0, "group": "uid-t0", "index": 0}
    names = {"namespace": "team-a", "job": "sums", "uid": "uid"}
    return GroupReady(**names, **place, base_version=4, version=4, trajectories=refs)


NOTHING = {"prompt_ids": b"", "output_ids": b"", "logprobs": b"", "stop_reason": StopReason.CONTEXT}


@pytest.mark.parametrize(("turns", "leaves", "untrained", "expected"), rows(__file__, "segments_of_turns"))
def test_turns_become_segments_of_which_each_generated_token_is_trained_once(turns, leaves, untrained, expected):
    """turns: the parent of each, and whether it opens a segment or has no tokens."""
    made = {}
    for number, (parent, *is_such) in enumerate(turns):
        opens = True if "opens" in is_such else None
        made[number] = turn(number, parent, opens=opens, **(NOTHING if "nothing" in is_such else {}))
    segments = segments_of(made, leaves, 1.0, untrained=untrained)
    assert [[part.ids.tolist(), part.ids[part.generated].tolist()] for part in segments] == expected


def test_a_segment_has_its_behaviour_logprobs_its_trajectorys_advantage_and_its_tokens():
    (part,) = segments_of({0: turn(0), 1: turn(1, 0)}, (1,), 2.5)
    assert np.allclose(part.behaviour, [0, 0, -0.5, -0.6, 0, 0, -1.5, -1.6])
    assert (part.advantage, part.version) == (2.5, 4)
    rewritten = Trajectory({0: turn(0), 1: turn(1, 0), 2: turn(2, 1, opens=True)}, (2,), 1.0)
    (parts,) = Weighing("centred", 4, 0).segments([[rewritten, played(0.0, turn(0))]])
    assert [int(part.generated.sum()) for part in parts] == [4, 2, 2]
    assert [part.num_trajectory_tokens for part in parts] == [6, 6, 2]
    assert [part.trajectory for part in parts] == [0, 0, 1]
    assert [part.advantage for part in parts] == [0.5, 0.5, -0.5]


@given(data=st.data())
def test_in_any_tree_of_turns_every_generated_token_is_trained_exactly_once(data):
    size = data.draw(st.integers(1, 9))
    turns = {}
    for number in range(size):
        parent = data.draw(st.none() | st.integers(0, number - 1)) if number else None
        turns[number] = turn(number, parent, opens=parent is None or data.draw(st.booleans()))
    inner = {made.parent for made in turns.values()}
    leaves = tuple(data.draw(st.permutations([number for number in turns if number not in inner])))
    segments = segments_of(turns, leaves, 1.0)
    trained = sorted(token for part in segments for token in part.ids[part.generated].tolist())
    assert trained == sorted(10 * number + end for number in turns for end in (5, 6))
    for part in segments:
        assert not part.generated[0]
        check_contexts(part, turns)


def check_contexts(part, turns):
    """What stands before a turn in a segment is its parent's conversation."""
    numbers = [int(token) // 10 for token in part.ids[::4]]
    assert turns[numbers[0]].opens_segment
    for before, number in itertools.pairwise(numbers):
        assert turns[number].parent == before
        assert not turns[number].opens_segment


async def test_of_a_candidate_only_its_own_turn_is_trained_and_it_is_compared_within_its_choice(harness):
    """Two turns lead to two candidates, 2 and 3; the episode goes on from 3 with turn 4."""
    for made in (turn(0), turn(1, 0), turn(2, 1), turn(3, 1), turn(4, 3)):
        await harness.publish_turn(made)
    await harness.publish_turn(turn(0, member=1, episode="uid-t0-1-1"))
    first, second = group((4,), (0,)).trajectories
    first = first.model_copy(update={"untrained": (2, 3)})
    fields = {"member": 0, "episode": first.episode, "choice": 0}
    candidates = [TrajectoryRef(leaves=(leaf,), reward=leaf + 1.0, **fields) for leaf in (2, 3)]
    ready = group((4,)).model_copy(update={"trajectories": (first, second, *candidates)})
    members = await read_group(harness.bus, harness.blobs, ready, EXPECTED)
    (segments,) = Weighing("centred", 4, 0).segments([members])
    found = [(part.ids[part.generated].tolist(), part.advantage, part.num_trajectory_tokens) for part in segments]
    ended = [[5, 6, 15, 16, 45, 46], [5, 6]]
    assert found == [(ended[0], -0.5, 6), (ended[1], 0.5, 2), ([25, 26], -0.5, 2), ([35, 36], 0.5, 2)]


def scored(leaf, logprobs, **changes: Any):
    """A teacher's scores of the conversation that ends with a turn."""
    fields = {"agent": "teacher", "scores": leaf, "logprobs": pack_logprobs(logprobs)}
    made = turn(0, prompt_ids=b"", output_ids=b"", **{**fields, **changes})
    return made.model_copy(update={"turn": SCORES + leaf})


async def test_of_a_teacher_every_token_has_its_own_advantage_and_one_that_it_has_not_scored_is_not_trained(harness):
    """Turn 0 leads to 1 and 2, and both conversations are scored: a shared turn counts once. One episode is enough."""
    for made in (
        turn(0),
        turn(1, 0),
        turn(2, 0),
        scored(1, [-0.1, -0.2, -0.3, float("nan")]),
        scored(2, [-9, -9, -3, -2]),
    ):
        await harness.publish_turn(made)
    taught = replace(EXPECTED, teacher="teacher")
    members = await read_group(harness.bus, harness.blobs, group((1, 2)), taught)
    ((first, second),) = Weighing("teacher", 4, 0).segments([members])
    assert first.ids[first.generated].tolist() == [5, 6, 15]
    assert second.ids[second.generated].tolist() == [25, 26]
    assert first.advantage[first.generated] == pytest.approx([0.4, 0.4, 1.2])
    assert second.advantage[second.generated] == pytest.approx([-0.5, 0.6])
    assert {part.num_trajectory_tokens for part in (first, second)} == {5}


@pytest.mark.parametrize(("logprobs", "changes", "text"), rows(__file__, "scores"))
async def test_scores_of_other_tokens_or_by_another_agent_train_nothing(harness, logprobs, changes, text):
    for made in (turn(0), scored(0, logprobs, **changes)):
        await harness.publish_turn(made)
    with pytest.raises(TrajectoryInvalid, match=text):
        await read_group(harness.bus, harness.blobs, group((0,)), replace(EXPECTED, teacher="teacher"))


@pytest.mark.parametrize(("credit", "expected"), rows(__file__, "credit"))
async def test_tokens_have_the_advantage_of_their_turn(harness, credit, expected):
    """Both members have turns 0 and 1. The prompt before turn 1 differs between them."""
    for made in (turn(0), turn(1, 0), turn(0, **SECOND), turn(1, 0, prompt_ids=pack_ids([7]), **SECOND)):
        await harness.publish_turn(made)
    rewards = [TurnReward(turn=0, reward=1.0), TurnReward(turn=1, reward=0.0)]
    first, second = group((1,), (1,)).trajectories
    refs = first.model_copy(update={"reward": 2.0, "turn_rewards": rewards}), second.model_copy(update={"reward": 0.0})
    ready = group((1,)).model_copy(update={"trajectories": refs})
    members = await read_group(harness.bus, harness.blobs, ready, EXPECTED)
    weighing = Weighing("centred", 4, 0, credit=CreditSettings(**credit))
    ((other, one),) = rows_of_groups(weighing, [members], 0, 99)  # the shorter row is the first
    assert [*one.advantages[::2], *other.advantages[::2]] == pytest.approx(expected)
    unknown = refs[0].model_copy(update={"turn_rewards": [TurnReward(turn=9, reward=1.0)]})
    with pytest.raises(TrajectoryInvalid, match="a reward for turn 9"):
        await read_group(harness.bus, harness.blobs, ready.model_copy(update={"trajectories": (unknown,)}), EXPECTED)


@pytest.mark.parametrize(("changes", "text"), rows(__file__, "contradictions"))
def test_a_turn_that_contradicts_its_group_or_itself_is_refused_with_the_contradiction(changes, text):
    whole = group((0,))
    check_turn(turn(0), whole, whole.trajectories[0], EXPECTED)
    packs = {"prompt_ids": pack_ids, "output_ids": pack_ids, "logprobs": pack_logprobs}
    changes = {name: packs[name](value) if isinstance(value, list) else value for name, value in changes.items()}
    with pytest.raises(TrajectoryInvalid, match="recorded by rollout-0") as caught:
        check_turn(turn(0, **changes), whole, whole.trajectories[0], EXPECTED)
    assert text in str(caught.value)


def test_of_a_demonstration_the_reply_is_trained_without_logprobs_and_only_in_a_step_of_demonstrations():
    whole, expected = group((0,)), Expectation(0.5, 1000, {0: "a" * 64}, is_demonstrated=True)
    reply = {"role": "assistant", "content": "a"}
    given = turn(0, demonstration=reply, version=0, adapter_sha256="", logprobs=b"")
    check_turn(given, whole, whole.trajectories[0], expected)
    ((part,),) = Weighing("none", 4, 0).segments([[Trajectory({0: given}, (0,), 0.0)]])
    assert (part.ids[part.generated].tolist(), part.behaviour.sum(), part.advantage) == ([5, 6], 0.0, 1.0)
    both = Trajectory({0: given, BRANCH_TURNS: turn(BRANCH_TURNS)}, (0, BRANCH_TURNS), 0.0)
    assert [[one.leaves for one in part] for part in trajectories.held_out_apart([both], 1)] == [
        [(0,)],
        [(BRANCH_TURNS,)],
    ]
    sampled, with_logprobs = turn(0), turn(0, demonstration=reply)
    for wrong, text in ((sampled, "sampled, and the step trains demonstrations"), (with_logprobs, "2 logp")):
        with pytest.raises(TrajectoryInvalid, match=text):
            check_turn(wrong.model_copy(update={"version": 0}), whole, whole.trajectories[0], expected)


def test_a_turn_may_be_newer_than_its_group_up_to_the_version_that_is_trained_if_turns_refresh():
    whole = group((0,)).model_copy(update={"base_version": 6})
    files = {4: "a" * 64, 6: "b" * 64}
    refreshed, pinned = (Expectation(1.0, 1000, files, refreshes) for refreshes in (True, False))
    newer = turn(0, version=6, adapter_sha256="b" * 64)
    check_turn(newer, whole, whole.trajectories[0], refreshed)
    wrong = [(refreshed, turn(0, version=version)) for version in (3, 7, 6)]
    for expected, one in ((pinned, newer), *wrong):
        with pytest.raises(TrajectoryInvalid, match=r"version is \d|adapter_sha256 is"):
            check_turn(one, whole, whole.trajectories[0], expected)


async def test_a_group_is_read_from_leaves_to_beginnings_also_from_the_blobs_and_weighed_by_its_rewards(harness):
    for member in (0, 1):
        ids: dict[str, Any] = {"member": member, "episode": f"uid-t0-{member}-1"}
        for made in (turn(0, **ids), turn(1, 0, **ids), turn(2, 1, **ids)):
            await harness.publish_turn(made)
        large = await wire.pack(turn(3, 0, text="x" * 1000, **ids), harness.blobs, limit_bytes=500)
        await harness.bus.publish(f"turn.team-a.sums.uid-t0-{member}-1.3", large)
    assert harness.blobs.contents
    (segments,) = GRPO.segments([await read_group(harness.bus, harness.blobs, group((2,), (2, 3)), EXPECTED)])
    assert [len(part) for part in segments] == [12, 12, 8]
    assert np.allclose([part.advantage for part in segments], [-1.0, 1.0, 1.0], atol=1e-4)


async def test_a_missing_turn_may_still_come_and_a_wrong_one_never_turns_right(harness):
    await harness.publish_turn(turn(0))
    with pytest.raises(trajectories.TurnMissing, match=r"turn\.team-a\.sums\.uid-t0-1-1\.0 is not recorded"):
        await read_group(harness.bus, harness.blobs, group((0,), (0,)), EXPECTED)
    await harness.bus.publish("turn.team-a.sums.uid-t0-1-1.0", wire.encode(turn(7, 3)))
    with pytest.raises(TrajectoryInvalid, match="holds something other than this turn"):
        await read_group(harness.bus, harness.blobs, group((0,), (0,)), EXPECTED)


def played(reward, *turns: Turn, compared_with=""):
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


LONG = {"stop_reason": StopReason.LENGTH}


@pytest.mark.parametrize(("turns", "leaves", "ending", "is_truncated"), rows(__file__, "truncated"))
def test_an_episode_is_truncated_when_a_limit_ended_it(turns, leaves, ending, is_truncated):
    made = {number: turn(number, parent, stop_reason=StopReason(stop)) for number, parent, stop in turns}
    ended = {"ending": Ending(ending)} if ending else {}
    assert Trajectory(made, tuple(leaves), 0.0, **ended).is_truncated == is_truncated


def test_truncated_episodes_are_left_out_or_cost_reward_and_are_compared_all_the_same():
    group = [played(1.0, turn(0)), played(0.0, turn(0, **LONG)), played(0.0, turn(0))]
    (kept,) = Weighing("leave-one-out", 4, 0, filter_overlong=True).segments([group])
    (every,) = Weighing("leave-one-out", 4, 0).segments([group])
    assert [part.advantage for part in every] == [1.0, -0.5, -0.5]
    assert [(part.advantage, part.trajectory) for part in kept] == [(1.0, 0), (-0.5, 2)]
    long = turn(1, 0, output_ids=pack_ids([1, 2, 3]), logprobs=pack_logprobs([-1.0, -1.0, -1.0]))
    group = [played(1.0, turn(0), long), played(1.0, turn(0), turn(1, 0))]
    (parts,) = Weighing("centred", max_tokens=4, overlong_tokens=2).segments([group])
    assert [part.advantage for part in parts] == [-0.25, 0.25]  # rewards 1 - 1/2 and 1


RUNNING = BaselineSettings(type="running-mean", decay=0.75)


def steps_of(baselines, *steps: dict[str, list[float]]):
    found = []
    for rewards in steps:
        baselines.add(rewards)
        found.append(baselines.finish_step())
    return found


def test_each_player_has_its_own_baseline_which_a_restart_takes_from_the_metrics_and_no_candidate_moves():
    found = steps_of(Baselines(RUNNING), {"": [2.0, 0.0], "second": [-1.0]}, {"": [0.0]}, {"second": [1.0]})
    assert found == [
        {"baseline": 1.0, "baseline_second": -1.0},
        {"baseline": 0.75, "baseline_second": -1.0},
        {"baseline": 0.75, "baseline_second": -0.5},
    ]
    first = Baselines(RUNNING)
    (metrics,) = steps_of(first, {"": [1.0], "second": [3.0]})
    again = Baselines(RUNNING)
    again.restore({"loss": 1.0, **metrics})
    again.add({"": [99.0]})
    again.rewind()
    assert again.values == first.values == {"": 1.0, "second": 3.0}
    assert steps_of(again, {"": [0.0]}) == steps_of(first, {"": [0.0]})
    baselines = Baselines(RUNNING)
    baselines.add({"": [1.0], ("", "episode", 0): [5.0, 6.0]})
    assert baselines.finish_step() == {"baseline": 1.0}
    plain = Baselines(BaselineSettings())
    plain.add({"": [1.0]})
    assert plain.finish_step() == {}
    assert not plain._step, "rewards of a job without baselines are not kept"
    plain.restore({"baseline": 1.0})
    assert plain.values == {}


@pytest.mark.parametrize(("baselines", "expected"), [({}, [2.0, 3.0]), ({"": 0.5, "second": 4.0}, [1.5, -1.0])])
def test_an_advantage_is_the_reward_minus_the_players_baseline_also_of_one_episode(baselines, expected):
    group = [played(2.0, turn(0)), played(3.0, turn(0), compared_with="second")]
    (parts,) = Weighing("standardised", 4, 0, has_baseline=True).segments([group], baselines)
    assert [part.advantage for part in parts] == expected
    overlong = Weighing("standardised", max_tokens=2, overlong_tokens=2, has_baseline=True)
    assert overlong.rewards(group) == {"": [1.0], "second": [2.0]}, "the penalty of a long turn is part of the reward"
