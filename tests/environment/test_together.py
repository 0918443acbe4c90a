"""Parts of an episode that run at the same time, and candidates from one state: numbers of turns, limits and errors depend on no thread's pace."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.environment.playing import AFTER, FIRST, ORDERS, SECOND, Meeting, OrderedReplies, agents_of
from tests.tables import rows

from marlaas import branches
from marlaas.branches import Branch
from marlaas.environment import Agents, TurnLimit
from marlaas.environment_types import Split, Task, TurnRequest
from marlaas.envs.loading import Environment
from marlaas.envs.playing import play_episode
from marlaas.episode_state import EpisodeState
from marlaas_api.errors import InvalidInput
from marlaas_api.names import BRANCH_TURNS, MAX_BRANCHES


@pytest.mark.parametrize("order", ORDERS)
def test_turns_are_numbered_by_the_order_of_the_parts(order):
    channel = OrderedReplies(*order)
    agents = agents_of(channel)
    agents.a.say("hello")

    def twice(agent):
        agent.say("one")
        return agent.say("two").text

    with agents.together() as at_once:
        of_a = at_once.run(twice, agents.a)
        of_b = at_once.run(twice, agents.b)
    assert (of_a.result, of_b.result) == (f"a{FIRST + 1}", f"b{SECOND + 1}")
    agents.a.say("and")
    assert channel.numbers() == {
        "a": [(0, None), (FIRST, 0), (FIRST + 1, FIRST), (AFTER, FIRST + 1)],
        "b": [(SECOND, None), (SECOND + 1, SECOND)],
    }


@pytest.mark.parametrize("slow", [FIRST, SECOND])
def test_the_turn_limit_of_a_part_depends_on_no_other_part(slow):
    """The agent has 2 of 4 turns left before the block: each part has these two; after it none is left."""
    quick = SECOND if slow == FIRST else FIRST
    order = [("a", quick + turn) for turn in range(3)] + [("a", slow + turn) for turn in range(2)]
    channel = OrderedReplies(*order, max_turns=4)
    agents = agents_of(channel, "a")
    agents.a.say("one")
    agents.a.say("two")

    def until_the_limit(agent):
        said = 0
        try:
            while True:
                agent.say("on")
                said += 1
        except TurnLimit:
            return said

    with agents.together() as at_once:
        parts = [at_once.run(until_the_limit, agents.a.fork()) for _ in range(2)]
    assert [part.result for part in parts] == [2, 2]
    assert [request.num_before for request in channel.requests if request.number < FIRST] == [0, 1]
    with pytest.raises(TurnLimit):
        agents.a.say("three")


def test_the_first_parts_error_is_raised_and_all_parts_have_ended():
    channel = OrderedReplies()
    agents = agents_of(channel)
    second_failed = threading.Event()

    def first():
        assert second_failed.wait(30)
        raise KeyError("first")

    def second():
        second_failed.set()
        raise ValueError("second")

    with pytest.raises(KeyError, match="first"), agents.together() as at_once:  # noqa: PT012
        at_once.run(first)
        at_once.run(second)
    assert agents.a.say("on").turn == AFTER


def nested(agents):
    with agents.together() as outer:
        outer.run(lambda: agents.together().__enter__())


def in_the_main_line(agents):
    with agents.together() as at_once:
        at_once.run(agents.b.say, "hi")
        agents.a.say("hi")


def one_conversation_twice(agents):
    with agents.together() as at_once:
        at_once.run(agents.a.say, "one")
        at_once.run(agents.a.say, "two")


def too_many_parts(agents):
    with agents.together() as at_once:
        for _ in range(MAX_BRANCHES + 1):
            at_once.run(int)


def in_a_thread(agents):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(agents.a.say, "hi").result()


@pytest.mark.parametrize(("code", "words"), rows(__file__, "strict_threads"))
def test_what_would_make_an_episode_depend_on_its_threads_is_refused(code, words):
    with pytest.raises(InvalidInput, match=words):
        globals()[code](agents_of(OrderedReplies()))


def test_turns_beyond_the_limit_are_refused_at_the_same_time_and_their_numbers_are_used_again():
    """Open turns never share a number, and numbers do not grow with the number of refusals."""
    channel = OrderedReplies(max_turns=1)
    state = EpisodeState(["a"], channel)
    numbers: list[int] = []
    answer = channel.turn

    def noted(request):
        numbers.append(request.number)
        return answer(request)

    channel.turn = noted  # type: ignore[method-assign]
    state.turn(TurnRequest("a", None, "x"))
    first, second, third = (state.begin(TurnRequest("a", None, "x"))[0] for _ in range(3))
    with pytest.raises(TurnLimit):
        second()
    again = state.begin(TurnRequest("a", None, "x"))[0]
    for refused in (third, again, first):
        with pytest.raises(TurnLimit):
            refused()
    with pytest.raises(TurnLimit):
        state.turn(TurnRequest("a", None, "x"))
    assert numbers == [0, 2, 3, 2, 1, 1]


def test_a_server_belongs_to_the_part_in_which_it_was_opened_while_that_runs():
    channel = OrderedReplies()
    state = EpisodeState(["a"], channel, is_strict=True)
    opened: list[Branch | None] = []

    def part():
        opened.append(state.branch())
        branches.at_once(state.begin_served(TurnRequest("a", None, "x"), 1, opened[0]))

    with state.together() as block:
        block.run(part)
    branches.at_once(state.begin_served(TurnRequest("a", FIRST, "y"), 1, opened[0]))
    assert channel.numbers() == {"a": [(FIRST, None), (SECOND, FIRST)]}


def test_where_one_script_speaks_for_all_parts_run_one_after_another():
    channel = OrderedReplies()
    agents = Agents(EpisodeState(["a", "b"], channel, in_order=True))

    next_may_begin = threading.Event()

    def twice(agent):
        for text in ("one", "two"):
            agent.say(text)
        return next_may_begin.wait(0.2)

    with agents.together() as block:
        first = block.run(twice, agents.a)
        next_may_begin.set()
        block.run(twice, agents.b)
    assert not first.result
    agents.a.branch("three", 3)
    order = [(one.agent, one.number) for one in channel.requests]
    assert order[:4] == [("a", FIRST), ("a", FIRST + 1), ("b", SECOND), ("b", SECOND + 1)]
    assert order[4:] == [("a", number * BRANCH_TURNS) for number in (4, 5, 6)]


def test_a_part_that_waits_for_a_later_one_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(branches, "PATIENCE_S", 0.01)
    agents = Agents(EpisodeState(["a", "b"], OrderedReplies(), in_order=True))
    spoken = threading.Event()

    def second():
        agents.b.say("x")
        spoken.set()

    with agents.together() as block:
        first = block.run(spoken.wait, 30)
        block.run(second)
    assert first.result


@pytest.mark.parametrize("first", [FIRST, SECOND, AFTER])
def test_candidates_continue_one_state_in_any_order_of_arrival_and_the_chosen_goes_on(first):
    channel = OrderedReplies(("a", 0), ("a", first))
    agents = agents_of(channel)
    agents.a.say("plan")
    choices = agents.a.branch("act", 3)
    assert [one.text for one in choices] == [f"a{FIRST}", f"a{SECOND}", f"a{AFTER}"]
    choices[1].go_on().say("then")
    agents.a.say("on the way without candidates")
    assert channel.numbers() == {
        "a": [(0, None), (FIRST, 0), (SECOND, 0), (AFTER, 0), (4 * BRANCH_TURNS, SECOND), (4 * BRANCH_TURNS + 1, 0)]
    }
    marked = {one.number: one.choice for one in channel.requests}
    assert marked == {0: None, FIRST: 0, SECOND: 0, AFTER: 0, 4 * BRANCH_TURNS: None, 4 * BRANCH_TURNS + 1: None}


def test_candidates_are_sampled_at_the_same_time_count_as_one_turn_and_are_given_all_or_none():
    assert len(agents_of(Meeting(3)).a.branch("act", 3)) == 3
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

    def play(task, agents):
        def part():
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
    assert {one.number: one.choice for one in channel.requests} == {FIRST: 0, FIRST + 1: 0, FIRST + 2: None}


def test_a_part_may_not_branch_a_conversation_to_which_another_part_speaks():
    agents, spoken = agents_of(OrderedReplies()), threading.Event()

    def say():
        agents.a.say("x")
        spoken.set()

    def after_it(act):
        assert spoken.wait(30)
        act()

    for other in (lambda: agents.a.branch("act", 2), agents.a.fork):
        spoken.clear()
        with pytest.raises(InvalidInput, match="speak to one conversation"), agents.together() as at_once:  # noqa: PT012
            at_once.run(say)
            at_once.run(after_it, other)


@pytest.mark.parametrize("n", [-1, 0, 1, 17])
def test_a_choice_has_two_to_sixteen_candidates(n):
    with pytest.raises(ValueError, match=f"`branch` gives 2 to 16 candidates, not {n}"):
        agents_of(OrderedReplies()).a.branch("act", n)
