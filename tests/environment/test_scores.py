"""Accepted rewards and metrics, for every way of giving them, unscored episodes, and rubrics by hand-worked numbers."""

import asyncio
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from tests.environment.playing import OrderedReplies, played
from tests.tables import rows

from marlaas.environment import Agents, Reply, Score, ServiceFailed
from marlaas.envs.extraction import extractor
from marlaas.episode_state import EpisodeState
from marlaas.rewards import Rubric, answer_reward, format_reward, length_penalty
from marlaas.scores import InvalidScore, metrics
from marlaas_api.errors import InvalidInput

NUMBERS = [0.5, Fraction(1, 2), np.float32(0.5), np.float64(0.5), torch.tensor(0.5), np.array(0.5)]
NO_NUMBERS = [math.nan, math.inf, "0.5", None, [0.5], torch.tensor([0.5, 0.5]), 1e31, 10**400]


def rewarded(give):
    return played(lambda task, agents: give(agents.a))


def in_a_tool(agent, value):
    with agent.tool():
        agent.reward = value


def on_the_agent(agent, value):
    agent.reward = value


def on_a_candidate(agent, value):
    for candidate in agent.branch("x", 2):
        candidate.reward = value


def on_a_turn(agent, value):
    agent.reward_turn(agent.say("x"), value)


WAYS = [
    lambda agent, value: value,
    lambda agent, value: {"a": value},
    on_the_agent,
    in_a_tool,
    on_a_candidate,
    on_a_turn,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_numbers_of_every_library_are_rewards_whichever_way_they_are_given(way, value):
    outcome = rewarded(lambda agent: way(agent, value))
    given = [reward for rewards in outcome.choices.values() for reward in rewards] or [outcome.rewards["a"]]
    assert set(given) == {0.5}
    assert all(type(reward) is float for reward in given)
    assert outcome.is_scored


def test_a_failed_service_is_no_fault_of_the_policy_also_within_a_tool_and_among_tasks():
    def play(task, agents):
        with agents.a.tool():
            raise ServiceFailed("away")

    async def search(agent):
        async with agent.tool():
            raise ServiceFailed("away")

    async def play_tasks(task, agents):
        async with asyncio.TaskGroup() as group:
            group.create_task(search(agents.a))

    for code in (play, play_tasks):
        with pytest.raises(ServiceFailed, match="away"):
            played(code)


def test_rewards_of_turns_are_added_to_the_episodes_and_a_candidate_has_its_own():
    def play(task, agents):
        first, _ = agents.a.say("x"), agents.b.say("x")
        agents.a.reward_turn(first, 5.0)
        agents.a.reward_turn(first, 0.25)
        with pytest.raises(InvalidInput, match="is a candidate"):
            agents.a.reward_turn(agents.a.branch("x", 2)[1].reply, 1.0)
        return {"a": 1.0}

    outcome = played(play)
    assert (outcome.rewards, outcome.turn_rewards) == ({"a": 1.25, "b": 0.0}, {("a", 0): 0.25})


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_no_number_is_a_fault_of_the_environment_also_within_a_tool(way, value):
    with pytest.raises(InvalidScore, match="expected a"):
        rewarded(lambda agent: way(agent, value))


@pytest.mark.parametrize(
    ("give", "is_scored"),
    [
        (lambda agent: None, False),
        (lambda agent: Score(None, {"x": 1.0}), False),
        (lambda agent: 0.0, True),
        (lambda agent: {}, True),
        (lambda agent: on_the_agent(agent, 0.0), True),
        (lambda agent: on_a_candidate(agent, 0.0), True),
    ],
)
def test_an_episode_without_a_reward_is_unscored_and_zero_is_a_reward(give, is_scored):
    assert rewarded(give).is_scored is is_scored


def test_metrics_that_are_none_or_nan_are_left_out_and_lone_surrogates_replaced_and_counted():
    given = {"a": 1, "b": None, "c": math.nan, "d": np.float32("nan"), "e": torch.tensor(2.0), "f": True}
    assert metrics(given) == {"a": 1.0, "e": 2.0, "f": 1.0}
    channel = OrderedReplies()
    state = EpisodeState(["policy"], channel)
    agent = Agents(state)["policy"]
    agent.say("\ud83d\ude00 \ud83d")
    agent.ask([{"role": "tool", "content": "fine"}], tools=[{"name": "\udcff"}])
    agent.complete("plain")
    texts = [channel.requests[0].append[0].content, *channel.requests[1].tools]
    assert texts == ["\U0001f600 \ufffd", '{"type": "function", "function": {"name": "\ufffd"}}']
    assert state.num_replaced == 2


def half(reply):
    return 0.5


def same(reply, truth, factor=1.0):
    return factor * (reply.text == truth)


def broken(reply):
    return math.nan


def test_a_reward_is_the_weighted_sum_and_every_part_is_logged():
    score = Rubric((2.0, same), (-0.5, half), (0, len_of_text)).score(reply=Reply("abc"), truth="abc")
    assert score.reward == 2.0 * 1.0 - 0.5 * 0.5
    assert score.metrics == {"same": 1.0, "half": 0.5, "len_of_text": 3.0}


def len_of_text(*, reply):
    return len(reply.text)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rubric(), "at least one part"),
        (lambda: Rubric((1, half), (2, half)), "two parts named 'half'"),
        (lambda: Rubric((1, lambda reply: 1.0)), "the function needs a name"),
        (lambda: Rubric(("1", half)), "a weight is a finite number"),  # type: ignore[arg-type]
        (lambda: Rubric((math.inf, half)), "a weight is a finite number"),
        (
            lambda: Rubric((1, same)).score(reply=Reply("a"), truths="a"),
            "'same' needs 'truth', .*; did you mean 'truths'",
        ),
        (lambda: Rubric((1, broken)).score(reply=Reply("a")), "'broken' is nan"),
        (lambda: extractor("boxd"), "expected one of last_number, boxed, tag, whole, regex"),
        (lambda: extractor("regex"), "needs the argument 'pattern'"),
        (lambda: extractor("tag", "x"), "`pattern` applies only to answer: regex"),
        (lambda: length_penalty(10, 10), "expected 0 <= free_tokens < max_tokens"),
    ],
)
def test_rubrics_and_extractions_that_cannot_be(make, words):
    with pytest.raises(InvalidInput, match=words):
        make()


def test_lengths_forms_and_answers_are_paid():
    """The length penalty is DAPO's. Answers are compared as numbers when both are."""
    penalty = length_penalty(100, 200)
    assert [penalty(Reply("", num_tokens=n)) for n in (0, 100, 125, 200, 999)] == [0.0, 0.0, -0.25, -1.0, -1.0]
    form = format_reward(r"<think>.*</think>\s*<answer>.*</answer>")
    assert form(Reply(" <think>a\nb</think>\n<answer>c</answer>\n")) == 1.0
    assert form(Reply("a</think><answer>c</answer>", opening="<think>\n")) == 1.0
    assert form(Reply("well <think></think><answer></answer>")) == form(Reply("<answer>c</answer>")) == 0.0
    pairs = {"so 7.0": 7, "1,000": "1000", "8": 7, "none": 7, "it is 0.50": 0.5}
    assert [answer_reward("last_number")(Reply(text), truth) for text, truth in pairs.items()] == [1, 1, 0, 0, 1]
    assert answer_reward("whole")(Reply("Paris"), "Paris") == 1.0
    opened = (Reply("7}", opening="= \\boxed{"), Reply("I do not know", opening="7 ="))
    assert [answer_reward(kind)(one, "7") for kind, one in zip(("boxed", "last_number"), opened, strict=True)] == [1, 0]


@pytest.mark.parametrize(("kind", "reply", "answer"), rows(__file__, "answers"))
def test_answers_are_found(kind, reply, answer):
    is_name = kind in ("last_number", "boxed", "tag", "whole")
    assert (extractor(kind) if is_name else extractor("regex", kind))(reply) == answer
