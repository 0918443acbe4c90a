"""Candidates: several replies from one state, each with a reward of its own."""

import threading

import pytest
from tests.environment.channels import FIRST, SECOND, Meeting, OrderedReplies, agents_of

from marlaas.environment import Agents, TurnLimit
from marlaas.environment_types import Split, Task
from marlaas.envs.loading import Environment
from marlaas.envs.playing import play_episode
from marlaas.episode_state import EpisodeState
from marlaas.scores import InvalidScore
from marlaas_api.errors import InvalidInput
from marlaas_api.names import BRANCH_TURNS

THIRD, AFTER = 3 * BRANCH_TURNS, 4 * BRANCH_TURNS


@pytest.mark.parametrize("first", [FIRST, SECOND, THIRD])
def test_candidates_continue_one_state_in_any_order_of_arrival_and_the_chosen_goes_on(first):
    channel = OrderedReplies(("a", 0), ("a", first))
    agents = agents_of(channel)
    agents.a.say("plan")
    choices = agents.a.branch("act", 3)
    assert [one.text for one in choices] == [f"a{FIRST}", f"a{SECOND}", f"a{THIRD}"]
    choices[1].go_on().say("then")
    agents.a.say("on the way without candidates")
    assert channel.numbers() == {"a": [(0, None), (FIRST, 0), (SECOND, 0), (THIRD, 0), (AFTER, SECOND), (AFTER + 1, 0)]}
    marked = {one.number: one.choice for one in channel.requests}
    assert marked == {0: None, FIRST: 0, SECOND: 0, THIRD: 0, AFTER: None, AFTER + 1: None}


def test_candidates_are_sampled_at_the_same_time():
    assert len(agents_of(Meeting(3)).a.branch("act", 3)) == 3


def test_candidates_count_as_one_turn_and_all_or_none_are_given():
    agents = agents_of(OrderedReplies(max_turns=2))
    (best, _) = agents.a.branch("act", 2)
    best.go_on().say("second turn")
    with pytest.raises(TurnLimit):
        agents.a.branch("third", 2)
    assert agents.b.say("b has its own").text == f"b{6 * BRANCH_TURNS}"


@pytest.mark.parametrize("first", [FIRST, FIRST + 1])
def test_within_a_part_candidates_have_numbers_of_the_part_in_any_order_of_arrival(first):
    channel = OrderedReplies(("a", first))
    agents = agents_of(channel)
    with agents.together() as at_once:
        one = at_once.run(agents.a.branch, "act", 2)
        at_once.run(agents.b.say, "meanwhile")
    assert [candidate.text for candidate in one.result] == [f"a{FIRST}", f"a{FIRST + 1}"]
    assert [request.parent for request in channel.requests if request.agent == "a"] == [None, None]


def test_within_a_part_candidates_count_as_turns_and_all_or_none_are_given():
    """A candidate without the others could be compared with nothing, so no reward would train it."""
    channel = OrderedReplies(max_turns=3)

    def play(task: Task, agents: Agents) -> float:
        def part() -> str:
            agents.a.branch("act", 2)
            with pytest.raises(TurnLimit):
                agents.a.branch("act again", 2)
            return agents.a.say("one turn is left").text

        with agents.together() as at_once:
            last = at_once.run(part)
        return float(last.result == f"a{FIRST + 2}")

    found = play_episode(Environment(play, True), Task(Split.TRAIN, 0, 0), EpisodeState(["a"], channel, is_strict=True))
    assert found.rewards == {"a": 1.0}
    assert found.choices == {0: [0.0, 0.0]}
    assert [(one.number, one.choice) for one in sorted(channel.requests, key=lambda one: one.number)] == [
        (FIRST, 0),
        (FIRST + 1, 0),
        (FIRST + 2, None),
    ]


def test_a_part_may_not_branch_a_conversation_to_which_another_part_speaks():
    agents, spoken = agents_of(OrderedReplies()), threading.Event()

    def say() -> None:
        agents.a.say("x")
        spoken.set()

    def branch() -> None:
        assert spoken.wait(30)
        agents.a.branch("act", 2)

    def fork() -> None:
        assert spoken.wait(30)
        agents.a.fork()

    for other in (branch, fork):
        spoken.clear()
        with pytest.raises(InvalidInput, match="speak to one conversation"), agents.together() as at_once:  # noqa: PT012
            at_once.run(say)
            at_once.run(other)


@pytest.mark.parametrize("n", [-1, 0, 1, 17])
def test_a_choice_has_two_to_sixteen_candidates(n):
    with pytest.raises(ValueError, match=f"`branch` gives 2 to 16 candidates, not {n}"):
        agents_of(OrderedReplies()).a.branch("act", n)


def rewarded(*rewards):
    def play(task: Task, agents: Agents) -> float:
        for candidate, reward in zip(agents.a.branch("act", len(rewards)), rewards, strict=True):
            candidate.reward = reward
        return 0.5

    return play


def test_an_outcome_has_the_rewards_of_the_candidates():
    state = EpisodeState(["a"], OrderedReplies())
    found = play_episode(Environment(rewarded(1.0, 0.0, 2.5), True), Task(Split.TRAIN, 0, 0), state)
    assert (found.rewards, found.choices) == ({"a": 0.5}, {0: [1.0, 0.0, 2.5]})


def test_a_candidates_reward_is_a_number():
    with pytest.raises(InvalidScore, match="the reward of a candidate is 'best'"):
        play_episode(
            Environment(rewarded(1.0, "best"), True), Task(Split.TRAIN, 0, 0), EpisodeState(["a"], OrderedReplies())
        )
