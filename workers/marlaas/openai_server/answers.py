"""From a reply to a chat completion: parse the tool calls in its text, and write the answer in the API's formats.

Calls have one of two formats. First: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen), any
number of them, with text around. Second: the whole reply is such an object, or a list of them, and names known tools
(Llama; `parameters` may replace `arguments`). Malformed calls stay text and are not repaired, because the policy
learns to write calls from their reward. An answer is one JSON body, or server-sent events.
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from marlaas.chat_messages import canonical
from marlaas.environment import Message, Reply, StopReason, ToolCall

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def find_calls(text: str, names: Collection[str]) -> tuple[str, tuple[ToolCall, ...]]:
    """Split a reply into its text and its calls, which have no ids yet. `names` are the known tools."""
    tagged = _TAGGED.findall(text)
    try:
        if tagged:
            return _TAGGED.sub("", text).strip(), tuple(_parsed_call(json.loads(body)) for body in tagged)
        return _plain(text, names)
    except (KeyError, TypeError, ValueError):
        return text, ()


def tool_names(tools: Sequence[str]) -> frozenset[str]:
    """Return the names of tools from their JSON texts."""
    return frozenset(json.loads(tool)["function"]["name"] for tool in tools)


def _plain(text: str, names: Collection[str]) -> tuple[str, tuple[ToolCall, ...]]:
    body = json.loads(text)
    calls = tuple(_parsed_call(one) for one in (body if isinstance(body, list) else [body]))
    if not calls or any(call.name not in names for call in calls):
        return text, ()
    return "", calls


def _parsed_call(given: Any) -> ToolCall:
    """Parse one call. Raises KeyError, TypeError or ValueError if it is malformed."""
    name, arguments = given["name"], given["arguments"] if "arguments" in given else given["parameters"]
    if not isinstance(name, str) or not name:
        raise ValueError("the name must be text")
    return ToolCall(name, canonical(arguments))


@dataclass(frozen=True, slots=True)
class ReplyChoice:
    """One reply, and the message that the client receives for it."""

    reply: Reply
    message: Message

    @property
    def finish_reason(self) -> str:
        """`length` if the reply was cut, even if it contains calls; else `tool_calls` or `stop`."""
        if self.reply.stop_reason is not StopReason.STOP:
            return "length"
        return "tool_calls" if self.message.tool_calls else "stop"


@dataclass(frozen=True, slots=True)
class Answer:
    """All choices of one request. `created` is in unix seconds."""

    model: str
    created: int
    choices: Sequence[ReplyChoice]

    def body(self) -> dict[str, Any]:
        """Return the answer as one `chat.completion`."""
        choices = [_choice(number, one, "message", _message(one.message)) for number, one in enumerate(self.choices)]
        return self._envelope("chat.completion", choices) | {"usage": self.usage()}

    def events(self, with_usage: bool) -> bytes:
        """Return the answer as a stream of `chat.completion.chunk`."""
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in self._chunks(with_usage)]
        return "".join([*lines, "data: [DONE]\n\n"]).encode()

    def usage(self) -> dict[str, int]:
        """Return the token counts. The prompt counts once, also for several choices."""
        replies = [choice.reply for choice in self.choices]
        prompt, output = replies[0].num_prompt_tokens, sum(reply.num_tokens for reply in replies)
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    def _chunks(self, with_usage: bool) -> Iterator[dict[str, Any]]:
        kind = "chat.completion.chunk"
        more = {"usage": None} if with_usage else {}
        for number, choice in enumerate(self.choices):
            delta = _message(choice.message)
            for index, call in enumerate(delta.get("tool_calls", ())):
                call["index"] = index
            yield self._envelope(kind, [_choice(number, None, "delta", delta)]) | more
            yield self._envelope(kind, [_choice(number, choice, "delta", {})]) | more
        if with_usage:
            yield self._envelope(kind, []) | {"usage": self.usage()}

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = f"chatcmpl-{self.choices[0].reply.turn}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def _choice(number: int, ended: ReplyChoice | None, key: str, content: dict[str, Any]) -> dict[str, Any]:
    reason = None if ended is None else ended.finish_reason
    return {"index": number, key: content, "logprobs": None, "finish_reason": reason}


def _message(message: Message) -> dict[str, Any]:
    """Return the message as JSON. Its content is null if it has tool calls only."""
    if not message.tool_calls:
        return {"role": "assistant", "content": message.content}
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    return {"role": "assistant", "content": message.content or None, "tool_calls": calls}
