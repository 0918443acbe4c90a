"""Warns if a chat template rewrites its past.

Each turn after such a rewrite opens a new segment, which costs a prefill and training time. Correct tokens do
not depend on this warning: every turn is checked in `conversation`. The warning is for people. It tries a few
typical replies, so it may miss a template that rewrites the past after other replies.
"""

import logging
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Protocol

from marlaas_api.messages import ChatMessage, StopReason
from marlaas_api.names import JobRef
from marlaas_worker.job_events import EventEmitter
from marlaas_worker.rollout.conversation import BadAppend, conclude, extend, read_reply
from marlaas_worker.rollout.renderers.replies import ReadingTokenizer

REASON = "TemplateRewritesPast"
_REPLIES = {
    "any reply": "four",
    "a reply with spaces or line ends around it": " four\n",
    "a reply with reasoning (<think>…</think>)": "<think>\ntwo and two\n</think>\n\nfour",
    "a tool call (<tool_call>…</tool_call>)": '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>',
}
_USER = (ChatMessage(role="user", content="two and two?"),)
_log = logging.getLogger(__name__)


class EndingTokenizer(ReadingTokenizer, Protocol):
    """A tokenizer that knows the end tokens of replies."""

    @property
    def end_ids(self) -> frozenset[int]: ...


def rewritten(tokenizer: EndingTokenizer) -> tuple[str, ...]:
    """Return descriptions of the replies after which the template rewrites its past; empty without a chat template."""
    try:
        ends = sorted(tokenizer.end_ids)
        return tuple(words for words, text in _REPLIES.items() if all(_rewrites(tokenizer, text, end) for end in ends))
    except BadAppend:
        return ()


class TemplateNotice:
    """Emits the warning once in the log, and once to every job."""

    def __init__(self, emitter: EventEmitter, tokenizer: EndingTokenizer) -> None:
        self._emitter = emitter
        self._tokenizer = tokenizer
        self._told: set[JobRef] = set()

    def emit(self, jobs: Iterable[JobRef]) -> None:
        """Emit the warning to jobs that have not received it. The first call logs it, even without jobs."""
        for job in set(jobs) - self._told if self._text else ():
            self._told.add(job)
            self._emitter.queue(job, REASON, self._text, once=f"{REASON}-{job.key}-{job.uid}")

    def forget(self, uids: Collection[str]) -> None:
        """Forget the jobs that are gone."""
        self._told = {job for job in self._told if job.uid not in uids}

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
    """Return whether the template rewrites the past within two turns: some keep the last reply and rewrite the one before."""
    conversation = None
    for _ in range(2):
        prompt = extend(tokenizer, conversation, _USER)
        if conversation is not None and prompt.draft.opens_segment:
            return True
        output = [*tokenizer.encode(text), end]
        conversation = conclude(prompt, read_reply(tokenizer, output, StopReason.STOP), output, StopReason.STOP)
    return extend(tokenizer, conversation, _USER).draft.opens_segment
