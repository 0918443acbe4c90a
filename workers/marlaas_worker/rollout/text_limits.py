"""Limits on the text of a request, and the part that is recorded if the model never saw it. Pure.

The turns of all jobs share one stream, which removes the oldest. Text that is fed to the engine is bounded by
the context window and costs its job engine time. Text that is not fed to the engine costs the job nothing.
Without a limit it could push other jobs' turns out of the stream before they are trained.
"""

import hashlib

from marlaas_api.messages import ChatMessage, GenerateRequest

KEPT_CHARACTERS = 1024
_HIDDEN_CHARACTERS = 64 << 10
_CHARACTERS_PER_ID = 64
"""More characters per id than any tokenized text has, except for long runs of white space."""

Asked = tuple[tuple[ChatMessage, ...] | str, tuple[str, ...] | None]
"""The appended messages or text, and the tools that the template shows from then on."""


def num_characters(request: GenerateRequest) -> int:
    """Return the number of characters of all text in a request, tools included."""
    append = request.append
    texts = [append] if isinstance(append, str) else [text for message in append for text in _texts(message)]
    return sum(map(len, (*texts, *(request.tools or ()))))


def is_shown(request: GenerateRequest, num_ids: int) -> bool:
    """Return whether the text of a request is plausible for a conversation of `num_ids` ids.

    False means that the chat template shows little of the text. The limit has a fixed allowance, because tools
    may be sent with every turn but are tokens of the first turn only.
    """
    return num_characters(request) <= _HIDDEN_CHARACTERS + _CHARACTERS_PER_ID * num_ids


def beginning(request: GenerateRequest) -> Asked:
    """Return the part to record of a request that was not fed to the engine.

    Short text is recorded whole; of long text, the beginning and a digest of the whole.
    """
    length = num_characters(request)
    if length <= KEPT_CHARACTERS:
        return request.append, request.tools
    digest = hashlib.sha256(request.model_dump_json(include={"append", "tools"}).encode()).hexdigest()
    append = request.append
    first = append if isinstance(append, str) else append[0].content if append else ""
    text = (
        f"{first[: KEPT_CHARACTERS // 2]}… [{length} characters that did not fit the context window; sha256 {digest}]"
    )
    return text if isinstance(append, str) else (ChatMessage(role="user", content=text),), None


def _texts(message: ChatMessage) -> tuple[str, ...]:
    calls = (text for call in message.tool_calls for text in (call.name, call.arguments, call.id))
    return (message.content, message.name or "", message.tool_call_id or "", *calls)
