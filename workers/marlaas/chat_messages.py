"""Chat messages and tools in the forms that libraries use, and texts without lone surrogates."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from marlaas.environment_types import InvalidTurn, Message, ToolCall
from marlaas.tool_functions import tool_of

_ROLES = {"developer": "system"} | {role: role for role in ("system", "user", "assistant", "tool")}
_REASONING = ("reasoning_content", "reasoning")
_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", *_REASONING)


def message_of(given: Message | Mapping[str, Any]) -> Message:
    """Return a message that an environment gives as a `Message` or as a mapping.

    Raises:
        InvalidTurn: as `read_message`, or the mapping has a field that would be lost.
    """
    if isinstance(given, Message):
        for key, value in (("name", given.name), ("tool_call_id", given.tool_call_id), ("reasoning", given.reasoning)):
            _text(value or "", f"a message: {key}")
        return replace(given, tool_calls=tuple(_call(one, "a message") for one in given.tool_calls or ()))
    if isinstance(given, Mapping):
        lost = [name for name, value in given.items() if name not in _FIELDS and value is not None]
        if lost:
            raise InvalidTurn(f"a message has the field {lost[0]!r:.80}; known are {', '.join(_FIELDS)}")
    return read_message(given, "a message")


def read_message(given: object, where: str) -> Message:
    """Return the message that a mapping describes, as in the chat-completions API. Other fields are ignored.

    The content is text, parts of text, or None beside tool calls. Tool calls have a `function` with a name and its
    arguments, or are flat; the arguments are a JSON object, as text or as a mapping.

    Args:
        where: names the message in the error.

    Raises:
        InvalidTurn: another form.
    """
    if not isinstance(given, Mapping):
        raise InvalidTurn(f"{where} is {type(given).__name__}; expected a Message or a mapping with role and content")
    role = _ROLES.get(str(given.get("role")))
    if role is None:
        raise InvalidTurn(f"{where}: the role must be one of {', '.join(_ROLES)}, not {given.get('role')!r:.80}")
    calls = given.get("tool_calls") or []
    if not isinstance(calls, list | tuple):
        raise InvalidTurn(f"{where}: tool_calls must be a list")
    name, answered = (_text(given.get(key) or "", f"{where}: {key}") or None for key in ("name", "tool_call_id"))
    content = given.get("content")
    if content is None and not calls and role != "assistant":
        raise InvalidTurn(f"{where}: content must be text, not None")
    reasoning = next((_text(given[key], f"{where}: {key}") for key in _REASONING if given.get(key)), "")
    return Message(role, _content(content, where), name, tuple(_call(one, where) for one in calls), answered, reasoning)


def tool_text(given: object) -> str:
    """Return the JSON text of a tool, in the form `{"type": "function", "function": {…}}`; a bare description is put into it.

    A Python function is described from its docstring and type hints (`tool_functions.tool_of`).

    Raises:
        InvalidTurn: another form, or a value that JSON lacks.
    """
    tool = tool_of(given) if callable(given) else given
    if isinstance(given, Mapping) and "function" not in given and given.get("type", "function") == "function":
        tool = {"type": "function", "function": {name: value for name, value in given.items() if name != "type"}}
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidTurn(
            f'a tool must be {{"type": "function", "function": {{"name": …, "parameters": {{…}}}}}}, not {given!r:.80}'
        )
    try:
        return json.dumps(tool, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidTurn(f"tool {function['name']!r}: {error}") from error


def canonical(arguments: str | Mapping[str, Any]) -> str:
    """Return the arguments of a call in canonical JSON, because clients parse and print them again. Raises ValueError unless it is an object."""
    parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(parsed, Mapping):
        raise ValueError("the arguments must be a JSON object")
    return json.dumps(dict(parsed), ensure_ascii=False)


def encodable(text: str) -> str:
    """Return a text that UTF-8 can encode: pairs of surrogates are joined, and lone ones become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def encodable_append(append: tuple[Message, ...] | str) -> tuple[Message, ...] | str:
    """Return messages, or raw text, whose texts UTF-8 can encode."""
    if isinstance(append, str):
        return encodable(append)
    return tuple(
        replace(
            one,
            content=encodable(one.content),
            name=one.name and encodable(one.name),
            tool_calls=tuple(
                ToolCall(encodable(c.name), encodable(c.arguments), encodable(c.id)) for c in one.tool_calls
            ),
            tool_call_id=one.tool_call_id and encodable(one.tool_call_id),
            reasoning=encodable(one.reasoning),
        )
        for one in append
    )


def _content(given: object, where: str) -> str:
    """Return the text, or the joined text of several parts."""
    if given is None or isinstance(given, str):
        return given or ""
    parts: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
        raise InvalidTurn(f"{where}: content must be text, not {type(given).__name__}")
    return "".join(_text(part.get("text"), f"{where}: content") for part in parts)


def _call(given: Any, where: str) -> ToolCall:
    try:
        if isinstance(given, ToolCall):
            canonical(given.arguments)
            return given
        function = given.get("function", given)
        return ToolCall(str(function["name"]), canonical(function["arguments"]), str(given.get("id") or ""))
    except (AttributeError, KeyError, TypeError, ValueError):
        text = f"{where}: a tool call needs an id and a function with a name and its arguments as JSON"
        raise InvalidTurn(text) from None


def _text(given: object, where: str) -> str:
    if not isinstance(given, str):
        raise InvalidTurn(f"{where} must be text")
    return given
