"""Parse tool calls in a reply's text, in the two common formats.

First: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen), any number of them, with text around.
Second: the whole reply is such an object, or a list of them, and names known tools (Llama; `parameters` may replace
`arguments`). Malformed calls stay text and are not repaired, because the policy learns to write calls from their
reward.
"""

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from marlaas.environment import ToolCall
from marlaas.openai_server.chat_request import canonical

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def find_calls(text: str, names: Collection[str]) -> tuple[str, tuple[ToolCall, ...]]:
    """Split a reply into its text and its calls, which have no ids yet. `names` are the known tools."""
    tagged = _TAGGED.findall(text)
    try:
        if tagged:
            return _TAGGED.sub("", text).strip(), tuple(_call(json.loads(body)) for body in tagged)
        return _plain(text, names)
    except (KeyError, TypeError, ValueError):
        return text, ()


def tool_names(tools: Sequence[str]) -> frozenset[str]:
    """Return the names of tools from their JSON texts."""
    return frozenset(json.loads(tool)["function"]["name"] for tool in tools)


def _plain(text: str, names: Collection[str]) -> tuple[str, tuple[ToolCall, ...]]:
    body = json.loads(text)
    calls = tuple(_call(one) for one in (body if isinstance(body, list) else [body]))
    if not calls or any(call.name not in names for call in calls):
        return text, ()
    return "", calls


def _call(given: Any) -> ToolCall:
    """Parse one call. Raises KeyError, TypeError or ValueError if it is malformed."""
    name, arguments = given["name"], given["arguments"] if "arguments" in given else given["parameters"]
    if not isinstance(name, str) or not name:
        raise ValueError("a name is text")
    return ToolCall(name, canonical(arguments if isinstance(arguments, str) else json.dumps(arguments)))
