"""Accepted rewards and metrics, for every way of giving them, and unscored episodes."""

import math

import numpy as np
import pytest
import torch
from tests.environment.playing import OrderedReplies, first_task, played

from marlaas.environment import Agents, Score
from marlaas.envs.loading import Environment
from marlaas.envs.playing import play_episode
from marlaas.envs.scripted import RecordedReplies
from marlaas.episode_state import EpisodeState
from marlaas.scores import InvalidScore, metrics

NUMBERS = [0.5, np.float32(0.5), np.float64(0.5), torch.tensor(0.5), np.array(0.5)]
NO_NUMBERS = [math.nan, math.inf, "0.5", None, [0.5], torch.tensor([0.5, 0.5]), 1e31, 10**400]


def rewarded(give):
    """The outcome of an episode in which `give` is called with the agent and its result is returned."""
    return played(lambda task, agents: give(agents.a))


def in_a_tool(agent, value):
    with agent.tool():
        agent.reward = value


def on_the_agent(agent, value):
    agent.reward = value


def on_a_candidate(agent, value):
    for candidate in agent.branch("x", 2):
        candidate.reward = value


WAYS = [lambda agent, value: value, lambda agent, value: {"a": value}, on_the_agent, in_a_tool, on_a_candidate]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_numbers_of_every_library_are_rewards_whichever_way_they_are_given(way, value):
    outcome = rewarded(lambda agent: way(agent, value))
    given = [reward for rewards in outcome.choices.values() for reward in rewards] or [outcome.rewards["a"]]
    assert set(given) == {0.5}
    assert all(type(reward) is float for reward in given)
    assert outcome.is_scored


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


def failing_tool(task, agents):
    with agents.policy.tool():
        raise KeyError("no such file")


def too_many_turns(task, agents):
    agents.policy.say("x")


@pytest.mark.parametrize(
    ("code", "ending", "text"),
    [(failing_tool, "tool_error", "KeyError: 'no such file'"), (too_many_turns, "max_turns", "")],
)
def test_what_the_policy_ended_is_scored_and_a_tools_error_is_kept(code, ending, text):
    state = EpisodeState(["policy"], RecordedReplies(lambda _: "x", 0))
    outcome = play_episode(Environment(code, True), first_task(), state)
    assert (outcome.ending, outcome.tool_error, outcome.is_scored) == (ending, text, True)


def test_metrics_that_are_none_or_nan_are_left_out():
    given = {"a": 1, "b": None, "c": math.nan, "d": np.float32("nan"), "e": torch.tensor(2.0), "f": True}
    assert metrics(given) == {"a": 1.0, "e": 2.0, "f": 1.0}


def test_lone_surrogates_are_replaced_and_counted():
    channel = OrderedReplies()
    state = EpisodeState(["policy"], channel)
    agent = Agents(state)["policy"]
    agent.say("\ud83d\ude00 \ud83d")
    agent.ask([{"role": "tool", "content": "fine"}], tools=[{"name": "\udcff"}])
    agent.complete("plain")
    texts = [channel.requests[0].append[0].content, *channel.requests[1].tools]
    assert texts == ["\U0001f600 \ufffd", '{"type": "function", "function": {"name": "\ufffd"}}']
    assert state.num_replaced == 2
