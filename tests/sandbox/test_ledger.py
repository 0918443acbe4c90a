"""Messages of a child, and the record of one play: numbers and limits of turns, endings, candidates and rewards."""

import pytest
from tests.tables import rows

from marlaas_api.messages import Ending, StopReason
from marlaas_api.names import BRANCH_TURNS, MAX_TURNS_FACTOR
from marlaas_worker.sandbox.ledger import BadChildMessage, ScoreMessage, TurnLedger, TurnMessage, parse

AGENTS = ("a", "b", "c")


def asked(agent, number=0, parent=None, num_before=None):
    before = number % BRANCH_TURNS if num_before is None else num_before
    fields = {"kind": "turn", "append": "x", "max_tokens": None}
    return TurnMessage(agent=agent, number=number, num_before=before, parent=parent, **fields)


def test_a_task_is_known_by_its_first_prompt_and_what_it_draws_and_cut_replies_are_counted():
    book = TurnLedger(AGENTS, 9)
    assert book.prompt("drawn") == ""
    for number, stop in enumerate((StopReason.STOP, StopReason.LENGTH, StopReason.CONTEXT)):
        turn = asked("a", number, number - 1 if number else None)
        book.begin(turn)
        book.end(turn, stop, 5)
    other = TurnLedger(AGENTS, 9)
    other.begin(asked("a"))
    assert (book.num_tokens, book.num_cut) == (15, 2)
    assert book.prompt("drawn") == other.prompt("drawn") != other.prompt("")


def scored(ending="completed"):
    return ScoreMessage.model_validate({"kind": "score", "rewards": {}, "metrics": {}, "ending": ending, "tool_s": 0.0})


def ledger(*turns: tuple[str, int, int | None], max_turns=9, last=StopReason.STOP):
    book = TurnLedger(AGENTS, max_turns)
    for agent, number, parent in turns:
        assert book.begin(asked(agent, number, parent))
        book.end(asked(agent, number, parent), last)
    return book


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (3, 0, 1, 5, 2, 4), (0, 2, 3, 1, 5, 4)])
def test_leaves_are_the_turns_from_which_none_goes_on_in_whatever_order_they_came(order):
    turns = [("a", 0, None), ("a", 1, 0), ("a", 2, 0), ("b", 0, None), ("b", BRANCH_TURNS, 0), ("b", 1, None)]
    assert ledger(*(turns[place] for place in order)).leaves() == {"a": (3, 6), "b": (4, 3 * BRANCH_TURNS + 1)}


@pytest.mark.parametrize("turn", rows(__file__, "wrong_turns"))
def test_numbers_of_turns_are_checked_and_an_agent_goes_on_from_its_own_turns_only(turn):
    book = ledger(("a", 0, None), ("b", 0, None), ("a", 1, 0), ("b", 1, 0), ("b", 2, 1))
    with pytest.raises(BadChildMessage, match=r"names its turn|not one of its turns"):
        book.begin(asked("a", *turn))


def test_turns_are_limited_for_each_agent_on_its_way_and_for_parts_together():
    book = ledger(("a", 0, None), ("a", 1, 0), ("b", 0, None), max_turns=2)
    assert book.begin(asked("b", 1, 0))
    assert not book.begin(asked("a", 2, 1))
    assert book.begin(asked("a", BRANCH_TURNS, 1, num_before=1))
    assert not book.begin(asked("a", 2 * BRANCH_TURNS, 1, num_before=2))
    assert not book.begin(asked("a", 3 * BRANCH_TURNS - 1)), "several may be beyond the limit at the same time"
    book = ledger(*(("a", branch * BRANCH_TURNS, None) for branch in range(MAX_TURNS_FACTOR)), max_turns=1)
    with pytest.raises(BadChildMessage, match=r"16 times rollout\.maxTurns"):
        book.begin(asked("a", MAX_TURNS_FACTOR * BRANCH_TURNS))


def test_an_ending_is_what_the_supervisor_saw():
    assert ledger(("a", 0, None)).ending(scored()) is Ending.COMPLETED
    assert ledger(("a", 0, None), last=StopReason.CONTEXT).ending(scored()) is Ending.MAX_TOKENS
    assert ledger(("a", 0, None), last=StopReason.LENGTH).ending(scored("tool_error")) is Ending.TOOL_ERROR
    full = ledger(("a", 0, None), max_turns=1, last=StopReason.LENGTH)
    full.begin(asked("a", 1, 0))
    assert full.ending(scored()) is Ending.MAX_TURNS


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_the_ending_of_parts_depends_on_their_order_and_not_on_their_pace(order):
    stops = {1: StopReason.LENGTH, 2: StopReason.STOP}
    book = TurnLedger(AGENTS, 9)
    for branch in order:
        book.begin(asked("a", branch * BRANCH_TURNS))
        book.end(asked("a", branch * BRANCH_TURNS), stops[branch])
    assert book.ending(scored()) is Ending.COMPLETED


@pytest.mark.parametrize("body", rows(__file__, "messages"))
def test_messages_of_a_child_are_validated(body):
    with pytest.raises(BadChildMessage):
        parse(body.encode(), ("a",))


def test_an_agent_that_the_task_may_not_call_has_no_turn_and_the_agents_are_named_before_the_first_one():
    book = TurnLedger(AGENTS, 9)
    book.limit(["a"])
    assert book.begin(asked("a", 0, None))
    with pytest.raises(BadChildMessage, match="agent 'b', which the task may not call"):
        book.begin(asked("b", 0, None))
    with pytest.raises(BadChildMessage, match="named after its first turn"):
        book.limit(["a", "b"])


def candidate(number, choice=0, parent=None, agent="a"):
    return asked(agent, number, parent).model_copy(update={"choice": choice})


def rewarded(turns=(), **rewards: list[float]):
    choices = [{"number": int(name[1:]), "rewards": values} for name, values in rewards.items()]
    fields = {"kind": "score", "rewards": {}, "metrics": {}, "ending": "completed", "tool_s": 0.0}
    of_turns = [dict(zip(("agent", "turn", "reward"), turn, strict=True)) for turn in turns]
    return ScoreMessage.model_validate({**fields, "choices": choices, "turn_rewards": of_turns})


@pytest.mark.parametrize("turn", [("a", 9), ("b", 1), ("a", BRANCH_TURNS)], ids=["no turn", "another's", "a candidate"])
def test_each_turn_but_a_candidate_has_a_reward_which_is_zero_unless_it_is_set(turn):
    book = ledger(("a", 0, None), ("a", 1, 0), ("b", 0, None))
    book.end(candidate(BRANCH_TURNS, parent=1), StopReason.STOP)
    book.reward(rewarded([("a", 1, 0.5)], c0=[0.0]))
    found = {agent: [(one.turn, one.reward) for one in own] for agent, own in book.turn_rewards().items()}
    assert found == {"a": [(0, 0.0), (3, 0.5)], "b": [(1, 0.0)]}
    with pytest.raises(BadChildMessage, match="has no such turn"):
        book.reward(rewarded([(*turn, 1.0)], c0=[0.0]))


def chosen(*candidates: TurnMessage):
    book = TurnLedger(AGENTS, 9)
    for one in candidates:
        assert book.begin(one)
    for one in candidates:
        book.end(one, StopReason.STOP)
    return book


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0)])
def test_candidates_are_kept_by_choice_in_the_order_of_their_turns(order, first, second):
    """The numbers of choices are given in the order in which parts arrive."""
    turns = [candidate(BRANCH_TURNS, first), candidate(2 * BRANCH_TURNS, first), candidate(1, second, agent="b")]
    book = chosen(*(turns[place] for place in order))
    book.reward(rewarded(**{f"c{first}": [1.0, 2.0], f"c{second}": [3.0]}))
    found = [(one.agent, one.turns, one.rewards) for one in book.choices()]
    assert found == [("b", (4,), (3.0,)), ("a", (3 * BRANCH_TURNS, 6 * BRANCH_TURNS), (1.0, 2.0))]


@pytest.mark.parametrize("other", [candidate(1, agent="b"), candidate(1, parent=0)], ids=["agent", "state"])
def test_candidates_of_one_choice_are_of_one_agent_in_one_state(other):
    book = TurnLedger(AGENTS, 9)
    for one in (asked("a", 0), candidate(BRANCH_TURNS)):
        book.begin(one)
        book.end(one, StopReason.STOP)
    with pytest.raises(BadChildMessage, match="choice 0 has candidates of different agents or after different turns"):
        book.begin(other)


@pytest.mark.parametrize("rewards", [{"c0": [1.0]}, {"c0": [1.0, 2.0, 3.0]}, {"c1": [1.0]}])
def test_each_generated_candidate_has_one_reward(rewards):
    with pytest.raises(BadChildMessage, match="rewards for the candidates of choice"):
        chosen(candidate(0), candidate(BRANCH_TURNS)).reward(rewarded(**rewards))
