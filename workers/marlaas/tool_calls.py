"""Tool calls in a reply's text, as JSON or as Python calls. Standard library only.

A malformed call is not repaired, because the policy learns to write calls from their reward.
"""

import ast
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from marlaas.chat_messages import canonical
from marlaas.environment_types import ReplyParts, ToolCall

MALFORMED = (KeyError, TypeError, ValueError, RecursionError, MemoryError, SyntaxError)
"""Exceptions of malformed calls."""
_SEPARATORS = " \t\r\n;,"
_DECODER = json.JSONDecoder()
_LONGEST = 1 << 16
"""Characters of the longest text that is parsed as Python."""


def tool_names(tools: Sequence[str]) -> frozenset[str]:
    """Return the names of tools from their JSON texts."""
    return frozenset(json.loads(tool)["function"]["name"] for tool in tools)


def named_call(name: str, arguments: str | Mapping[str, Any]) -> ToolCall:
    """Return a call. Raises one of MALFORMED unless the arguments are a JSON object."""
    if not isinstance(name, str) or not name.strip():
        raise ValueError("a call needs a name")
    return ToolCall(name.strip(), canonical(arguments))


def json_calls(body: str) -> tuple[ToolCall, ...]:
    """Return the calls in a text of JSON objects `{"name": …, "arguments": {…}}`, or of lists of them. Raises one of MALFORMED.

    `parameters` may replace `arguments`.
    """
    calls: list[ToolCall] = []
    rest = body.strip(_SEPARATORS)
    at = 0
    while at < len(rest):
        given, at = _DECODER.raw_decode(rest, at)
        calls += (_json_call(one) for one in (given if isinstance(given, list) else [given]))
        while at < len(rest) and rest[at] in _SEPARATORS:
            at += 1
    if not calls:
        raise ValueError("there is no call")
    return tuple(calls)


def python_calls(body: str) -> tuple[ToolCall, ...]:
    """Return the calls in a list of Python calls with constant keyword arguments, `[add(a=1, b=2)]`. Raises one of MALFORMED."""
    if len(body) > _LONGEST:
        raise ValueError("the text is too long for calls")
    expression = ast.parse(body.strip(), mode="eval").body
    found = expression.elts if isinstance(expression, ast.List) else [expression]
    if not found:
        raise ValueError("there is no call")
    return tuple(_python_call(one) for one in found)


def bare_calls(text: str, names: Collection[str], form: str) -> tuple[ToolCall, ...]:
    """Return the calls if a whole text is calls of known tools; otherwise none.

    Args:
        names: the known tools.
        form: `json`, `python`, or empty: the model writes no such calls.
    """
    begins = text.lstrip()[:1]
    if not names or (form, begins) not in {("json", "{"), ("json", "["), ("python", "[")}:
        return ()
    try:
        calls = json_calls(text) if form == "json" else python_calls(text)
    except MALFORMED:
        return ()
    return calls if all(call.name in names for call in calls) else ()


def chatml_parts(text: str, names: Collection[str]) -> ReplyParts:
    """Return the parts of a reply that a person or a script has written, in the form of ChatML models.

    The replies of a model are parsed by the rollout role, for each model family.
    """
    before, opened, rest = text.partition("<think>")
    thought, _, rest = rest.partition("</think>") if opened else ("", "", "")
    content, *tagged = (before + rest).split("<tool_call>")
    try:
        bodies = [one.partition("</tool_call>") for one in tagged]
        calls = tuple(call for body, _, _ in bodies for call in json_calls(body))
        content += "".join(after for _, _, after in bodies)
    except MALFORMED:
        content, calls = before + rest, ()
    if not calls and (calls := bare_calls(content, names, "json")):
        content = ""
    return ReplyParts(thought.strip(), content.strip() if opened or calls else content, calls, text)


def _json_call(given: Any) -> ToolCall:
    return named_call(given["name"], given["arguments"] if "arguments" in given else given["parameters"])


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or any(one.arg is None for one in node.keywords):
        raise ValueError("a call has a name and keyword arguments")
    arguments = {str(one.arg): ast.literal_eval(one.value) for one in node.keywords}
    return named_call(ast.unparse(node.func), arguments)
