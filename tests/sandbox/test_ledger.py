import signal

import pytest

from marlaas_api.messages import Ending, FaultClass, StopReason
from marlaas_worker.sandbox.child_messages import ScoreMessage, TurnMessage
from marlaas_worker.sandbox.faults import fault_of_exit
from marlaas_worker.sandbox.server import Ended
from marlaas_worker.sandbox.session import BadChildMessage, TurnLedger, parse


def asked(agent: str, parent: int | None = None) -> TurnMessage:
    return TurnMessage(kind="turn", agent=agent, parent=parent, append="x", max_tokens=None)


def scored(ending: str = "completed") -> ScoreMessage:
    return ScoreMessage.model_validate({"kind": "score", "rewards": {}, "metrics": {}, "ending": ending, "tool_s": 0.0})


def ledger(*turns: tuple[str, int | None], max_turns: int = 9, last: StopReason = StopReason.STOP) -> TurnLedger:
    book = TurnLedger(("a", "b", "c"), max_turns)
    for agent, parent in turns:
        assert book.admits(asked(agent, parent))
        book.note(asked(agent, parent), last)
    return book


def test_leaves_are_the_turns_from_which_none_goes_on():
    book = ledger(("a", None), ("b", None), ("a", 0), ("a", 0), ("b", 1), ("b", None))
    assert book.leaves() == {"a": (2, 3), "b": (4, 5)}


@pytest.mark.parametrize("parent", [1, 2, 7])
def test_an_agent_goes_on_from_its_own_turns_only(parent):
    with pytest.raises(BadChildMessage, match="not one of its turns"):
        ledger(("a", None), ("b", None)).admits(asked("a", parent))


def test_turns_are_limited_for_each_agent():
    book = ledger(("a", None), ("a", 0), ("b", None), max_turns=2)
    assert book.admits(asked("b", 2))
    assert not book.admits(asked("a", 1))


def test_an_ending_is_what_the_supervisor_saw():
    assert ledger(("a", None)).ending(scored()) is Ending.COMPLETED
    assert ledger(("a", None), last=StopReason.CONTEXT).ending(scored()) is Ending.MAX_TOKENS
    assert ledger(("a", None), last=StopReason.LENGTH).ending(scored("tool_error")) is Ending.TOOL_ERROR
    full = ledger(("a", None), max_turns=1, last=StopReason.LENGTH)
    full.admits(asked("a", 0))
    assert full.ending(scored()) is Ending.MAX_TURNS


@pytest.mark.parametrize(
    ("ended", "fault", "by_policy"),
    [
        (Ended(-signal.SIGKILL, "memory"), FaultClass.ENV, True),
        (Ended(-signal.SIGKILL, "processes"), FaultClass.ENV, True),
        (Ended(-signal.SIGKILL), FaultClass.ENV, False),
        (Ended(-signal.SIGSEGV), FaultClass.ENV, True),
        (Ended(0), FaultClass.ENV, True),
        (Ended(None, "fork server"), FaultClass.INFRA, False),
    ],
)
def test_the_exit_of_a_child_determines_the_fault(ended, fault, by_policy):
    found = fault_of_exit(ended, "64Mi")
    assert (found.fault, found.by_policy) == (fault, by_policy)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"kind":"bye"}',
        b'{"kind":"turn","agent":"z","parent":null,"append":"x","max_tokens":null}',
        b'{"kind":"turn","agent":"a","parent":-1,"append":"x","max_tokens":null}',
        b'{"kind":"turn","agent":"a","parent":null,"append":[],"max_tokens":null}',
        b'{"kind":"turn","agent":"a","parent":null,"append":"x","max_tokens":0}',
        b'{"kind":"turn","agent":"a","parent":null,"append":"x","max_tokens":1000000000000000000000000000000}',
        b'{"kind":"turn","agent":"a","parent":null,"append":[{"role":"boss","content":"x"}],"max_tokens":null}',
        b'{"kind":"score","rewards":{},"metrics":{},"ending":"completed","tool_s":0}',
        b'{"kind":"score","rewards":{"a":NaN},"metrics":{},"ending":"completed","tool_s":0}',
        b'{"kind":"score","rewards":{"a":"1"},"metrics":{},"ending":"completed","tool_s":0}',
        b'{"kind":"score","rewards":{"a":1.7e308},"metrics":{},"ending":"completed","tool_s":0}',
        b'{"kind":"score","rewards":{"a":1},"metrics":{"n":-1e31},"ending":"completed","tool_s":0}',
        b'{"kind":"score","rewards":{"a":1},"metrics":{"\\u001b[2J":1},"ending":"completed","tool_s":0}',
        b'{"kind":"score","rewards":{"a":1},"metrics":{},"ending":"won","tool_s":0}',
        b'{"kind":"score","rewards":{"a":1},"metrics":{},"ending":"completed","tool_s":0,"bill":0}',
    ],
)
def test_messages_of_a_child_are_validated(body):
    with pytest.raises(BadChildMessage):
        parse(body, ("a",))


def test_valid_messages_are_parsed():
    message = parse(b'{"kind":"score","rewards":{"a":1},"metrics":{"n":2},"ending":"completed","tool_s":0}', ("a",))
    assert isinstance(message, ScoreMessage)
    assert message.rewards == {"a": 1.0}
