"""The forms of messages and tools that `ask` takes."""

import pytest
from tests.tables import rows

from marlaas.chat_messages import message_of, tool_text
from marlaas.environment import Message, ToolCall
from marlaas.environment_types import InvalidTurn

CALL = ToolCall("add", '{"a": 1}', "c1")
FUNCTION = {"name": "add", "parameters": {"type": "object"}}
TEXT = '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}'


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"role": "user", "content": "x"}, Message("user", "x")),
        ({"role": "developer", "content": "x", "refusal": None}, Message("system", "x")),
        (
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
            Message("user", "xy"),
        ),
        ({"role": "tool", "content": "3", "tool_call_id": "c1"}, Message("tool", "3", tool_call_id="c1")),
        *(
            ({"role": "assistant", "content": None, "tool_calls": [call]}, Message("assistant", "", tool_calls=(CALL,)))
            for call in (
                CALL,
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
                {"id": "c1", "function": {"name": "add", "arguments": {"a": 1}}},
                {"id": "c1", "name": "add", "arguments": {"a": 1}},
            )
        ),
    ],
)
def test_messages_in_the_forms_of_other_libraries(given, message):
    assert message_of(given) == message


@pytest.mark.parametrize(
    ("given", "words"),
    rows(__file__, "messages"),
)
def test_other_messages_are_refused_with_the_reason(given, words):
    with pytest.raises(InvalidTurn, match=words):
        message_of(given)


@pytest.mark.parametrize(
    "given", [FUNCTION, {"type": "function", **FUNCTION}, {"type": "function", "function": FUNCTION}]
)
def test_a_tool_with_and_without_its_wrapper(given):
    assert tool_text(given) == TEXT


@pytest.mark.parametrize(
    "given", [{"type": "web_search"}, {"function": {}}, "add", {"name": "add", "parameters": {1, 2}}]
)
def test_other_tools_are_refused(given):
    with pytest.raises(InvalidTurn, match="tool"):
        tool_text(given)
