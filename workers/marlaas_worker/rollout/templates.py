"""Tells beforehand whether a chat template rewrites its past: each such turn opens a new segment, which costs a prefill and training time.

The check at every turn (`conversation`) is what keeps tokens right; this one is for people. It tries, and proves nothing: a template may
do it for replies of which nobody thought here.
"""

import logging
from collections.abc import Iterable
from functools import cached_property
from typing import Protocol

from marlaas_api.messages import ChatMessage, StopReason
from marlaas_api.names import JobRef
from marlaas_worker.rollout.conversation import BadAppend, Tokenizer, conclude, extend, read_reply
from marlaas_worker.rollout.event_emitter import EventEmitter

REASON = "TemplateRewritesPast"
_REPLIES = {
    "any reply": "four",
    "a reply with spaces or line ends around it": " four\n",
    "a reply with reasoning (<think>…</think>)": "<think>\ntwo and two\n</think>\n\nfour",
    "a tool call (<tool_call>…</tool_call>)": '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>',
}
_USER = (ChatMessage(role="user", content="two and two?"),)
_log = logging.getLogger(__name__)


class EndingTokenizer(Tokenizer, Protocol):
    """A tokenizer that knows with what a reply may end."""

    @property
    def end_ids(self) -> frozenset[int]: ...


def rewritten(tokenizer: EndingTokenizer) -> tuple[str, ...]:
    """After which replies the template shows another past, in words; nothing where there is no template for chat."""
    try:
        ends = sorted(tokenizer.end_ids)
        return tuple(words for words, text in _REPLIES.items() if all(_rewrites(tokenizer, text, end) for end in ends))
    except BadAppend:
        return ()


class TemplateNotice:
    """Says it once in the log, and once to every job."""

    def __init__(self, emitter: EventEmitter, tokenizer: EndingTokenizer) -> None:
        self._emitter = emitter
        self._tokenizer = tokenizer
        self._told: set[JobRef] = set()

    def emit(self, jobs: Iterable[JobRef]) -> None:
        """Tell the jobs that do not know yet; the log hears of it the first time, jobs or none."""
        for job in set(jobs) - self._told if self._text else ():
            self._told.add(job)
            self._emitter.emit(job, REASON, self._text, once=f"{REASON}-{job.key}-{job.uid}")

    @cached_property
    def _text(self) -> str:
        found = rewritten(self._tokenizer)
        if not found:
            return ""
        text = (
            f"the base model's chat template rewrites its past after {', '.join(found)}: the next turn of such a conversation opens a "
            "new segment, with its whole prompt again"
        )
        _log.warning("%s", text)
        return text


def _rewrites(tokenizer: EndingTokenizer, text: str, end: int) -> bool:
    """Two turns: some templates keep the last reply and rewrite the one before."""
    conversation = None
    for _ in range(2):
        prompt = extend(tokenizer, conversation, _USER)
        if conversation is not None and prompt.draft.opens_segment:
            return True
        output = [*tokenizer.encode(text), end]
        conversation = conclude(prompt, read_reply(tokenizer, output, StopReason.STOP), output, StopReason.STOP)
    return extend(tokenizer, conversation, _USER).draft.opens_segment
