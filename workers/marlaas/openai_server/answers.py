"""From a reply to a chat completion in the API's formats: one JSON body, or server-sent events."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from marlaas.environment import Message, Reply, StopReason


@dataclass(frozen=True, slots=True)
class ReplyChoice:
    """One reply, and the message that the client receives for it. reasoning: empty if there is none, or if it is in the content."""

    reply: Reply
    message: Message
    reasoning: str = ""

    @property
    def finish_reason(self) -> str:
        """`length` if the reply was cut, even if it contains calls; else `tool_calls` or `stop`."""
        if self.reply.stop_reason in (StopReason.LENGTH, StopReason.CONTEXT):
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
        choices = [_choice(number, one, "message", _message(one)) for number, one in enumerate(self.choices)]
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
            delta = _message(choice)
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


def _message(one: ReplyChoice) -> dict[str, Any]:
    """Return the message as JSON. Its content is null if it has tool calls only; reasoning is in `reasoning_content`, as servers have it."""
    message = one.message
    body: dict[str, Any] = {"role": "assistant", "content": message.content}
    if one.reasoning:
        body["reasoning_content"] = one.reasoning
    if message.tool_calls:
        body["content"] = message.content or None
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return body
