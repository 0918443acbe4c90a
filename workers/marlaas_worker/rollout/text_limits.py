"""How much a sandbox wrote into a request, and what is kept of it where the model never saw it. Pure.

Turns of all jobs lie in one log that forgets its oldest. What is fed to the engine is bounded by the context, and costs its job time in the engine; what
is not costs nothing, and could push other jobs' turns out before they are trained.
"""

import hashlib

from marlaas_api.messages import ChatMessage, GenerateRequest

KEPT_CHARACTERS = 1024
_HIDDEN_CHARACTERS = 64 << 10
_CHARACTERS_PER_ID = 64
"""More than any text has that is really tokenised, but for long runs of white space."""

Asked = tuple[tuple[ChatMessage, ...] | str, tuple[str, ...] | None]
"""What is appended, and the tools that are shown from then on."""


def num_characters(request: GenerateRequest) -> int:
    """Characters of everything that a request wants appended and shown."""
    append = request.append
    texts = [append] if isinstance(append, str) else [text for message in append for text in _texts(message)]
    return sum(map(len, (*texts, *(request.tools or ()))))


def is_shown(request: GenerateRequest, num_ids: int) -> bool:
    """Whether a request in a conversation of so many ids holds about what the model sees of it, not much that no template shows. (Tools may come
    again with every turn, and are tokens of the first.)"""
    return num_characters(request) <= _HIDDEN_CHARACTERS + _CHARACTERS_PER_ID * num_ids


def beginning(request: GenerateRequest) -> Asked:
    """What is recorded of a request that was not fed to the engine: all of it if it is short, else its beginning and a digest of the whole."""
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
