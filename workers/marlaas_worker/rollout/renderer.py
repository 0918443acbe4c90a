"""Parses the replies of a model family: from token ids to text, and from text to reasoning, content and tool calls.

The parser is transformers' (`transformers.utils.chat_parsing`), with the grammar of `marlaas.models.families`, or with the
`response_template` of the model's own tokenizer. Imports nothing of vLLM, so that replies of the reference engine are parsed alike.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from marlaas.environment_types import ToolCall
from marlaas.models.chat_template import Render, lost_tokens
from marlaas.models.families import CALLS, CHATML, THINK, Family, family_of
from marlaas.tool_calls import MALFORMED, bare_calls, json_calls, named_call, python_calls, tool_names
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import ChatMessage, ReplyPartsMessage, ToolCallMessage

_ANCHOR = "\0"
"""`start_anchor` of our grammars: every response template needs one. A prefix that the parser gets before a reply begins with it."""
_PIECE = 512
"""Characters that the parser is fed at a time."""
_ONLY_CONTENT: dict[str, Any] = {"content": {}}
_REASONING = ("reasoning", "thinking", "reasoning_content")
"""Names of the field with the reasoning; those of other projects' response templates are the last two."""


class TemplateRefused(InvalidInput):
    """The model's chat template writes special tokens around reasoning or tool calls that no known family has."""


@dataclass(frozen=True)
class Renderer:
    """Parser of one model's replies.

    Attributes:
        tokenizer: transformers' tokenizer of the model.
        family: the model's family; None if no known one fits. Then replies are parsed as those of ChatML models.
        own: the `response_template` of the model's tokenizer, which replaces the family's grammar; None: it has none.
    """

    tokenizer: Any
    family: Family | None
    own: dict[str, Any] | None = None

    @classmethod
    def of(cls, tokenizer: Any) -> "Renderer":
        """Return the renderer for a tokenizer of transformers."""
        template = tokenizer.chat_template
        text = template if isinstance(template, str) else ""
        return cls(tokenizer, family_of(text, tokenizer.get_vocab()), getattr(tokenizer, "response_template", None))

    @cached_property
    def writes_specials(self) -> bool:
        """Whether `text` keeps special tokens, because the grammar of the model's replies contains some of them."""
        marks = json.dumps((self.own or self._family.grammar), default=dict, ensure_ascii=False).replace("\\", "")
        return any(token in marks for token in self._specials)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a reply's ids, as the environment gets it (`Reply.text`). Special tokens are kept if `writes_specials`."""
        return self._decode(ids, skips=not self.writes_specials)

    def parts(self, ids: Sequence[int], before: str, tools: Sequence[str]) -> ReplyPartsMessage | None:
        """Parse a reply's ids, without the end token; return None if text, content and raw text are equal.

        Args:
            before: the text of the prompt; reasoning may begin at its end.
            tools: JSON texts of the functions that the template shows.
        """
        raw, text = self._decode(ids, skips=False), self.text(ids)
        reasoning, content, calls = self._read(text, before, tools)
        if not reasoning and not calls and content == text == raw:
            return None
        told = tuple(ToolCallMessage(name=call.name, arguments=call.arguments) for call in calls)
        return ReplyPartsMessage(reasoning=reasoning, content=content, tool_calls=told, raw=raw)

    def past(self, text: str, before: str, tools: Sequence[str]) -> tuple[ChatMessage, ...]:
        """Return the messages that may represent a past reply in the chat template, in the order in which to try them.

        One message has the reply's parts (reasoning, content, calls), the other its plain text. If the content is the whole text, there
        is only the second. The plain text comes first if it is unknown how the template shows parts (`_is_plain`).

        Args:
            text: the reply.
            before: the text of the prompt.
            tools: JSON texts of the functions that the template shows.
        """
        plain = ChatMessage(role="assistant", content=text)
        reasoning, content, calls = self._read(text, before, tools)
        if not reasoning and not calls and content == text:
            return (plain,)
        told = tuple(
            ToolCallMessage(name=call.name, arguments=call.arguments, id=f"call{number:05}")
            for number, call in enumerate(calls)
        )
        parts = ChatMessage(role="assistant", content=content, tool_calls=told, reasoning_content=reasoning)
        return (plain, parts) if self._is_plain else (parts, plain)

    def check(self, render: Render) -> None:
        """Raise TemplateRefused if the template writes reasoning or calls with special tokens, and their form is unknown (`_is_plain`).

        render: renders messages with the template.
        """
        lost = lost_tokens(render, self._specials) if self._is_plain else ""
        if lost:
            raise TemplateRefused(lost)

    @property
    def _is_plain(self) -> bool:
        """Whether the form in which the template writes reasoning and calls is unknown: no `response_template`, and no family but ChatML."""
        return self.own is None and self._family is CHATML

    @property
    def _family(self) -> Family:
        return self.family or CHATML

    @cached_property
    def _specials(self) -> frozenset[str]:
        added = self.tokenizer.added_tokens_decoder.values()  # Many tokenizers name only a few of them.
        return frozenset((*self.tokenizer.all_special_tokens, *(str(token) for token in added if token.special)))

    @cached_property
    def _grammars(self) -> tuple[Any, Any]:
        """Two response templates, as transformers loads them: with the fields of tool calls, and without."""
        whole = self.own or {"fields": dict(self._family.grammar), "start_anchor": _ANCHOR}
        spoken = {name: field for name, field in whole["fields"].items() if not _holds_calls(name)}
        return load_response_template(whole), load_response_template({**whole, "fields": spoken or _ONLY_CONTENT})

    def _decode(self, ids: Sequence[int], *, skips: bool) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False))

    def _read(self, text: str, before: str, tools: Sequence[str]) -> tuple[str, str, tuple[ToolCall, ...]]:
        """Return the reasoning, content and calls of a reply's text. Malformed calls are content. before, tools: as of `parts`."""
        whole, spoken = self._grammars
        prefix = before if self.own is not None else _ANCHOR + THINK if before.rstrip().endswith(THINK) else ""
        try:
            found = _parsed(text, whole, prefix, [json.loads(tool) for tool in tools])
            calls = self._calls(found)
        except MALFORMED:
            found, calls = _parsed(text, spoken, prefix, []), ()
        reasoning = next((str(found[name]) for name in _REASONING if found.get(name)), "")
        content = str(found.get("content", ""))
        if not reasoning and not calls and (not content or content.strip() == text.strip()):
            content = text
        if not calls and (calls := bare_calls(content, tool_names(tools), self._family.bare)):
            content = ""
        return reasoning.strip(), content.strip() if reasoning or calls else content, calls

    def _calls(self, found: dict[str, Any]) -> tuple[ToolCall, ...]:
        """Return the calls in the fields that the parser found. Raises one of MALFORMED."""
        calls: list[ToolCall] = []
        for name in filter(_holds_calls, found):
            values = found[name] if isinstance(found[name], list) else [found[name]]
            for value in values:
                calls += self._from_text(value) if isinstance(value, str) else _from_fields(value)
        return tuple(calls)

    def _from_text(self, body: str) -> Iterable[ToolCall]:
        return python_calls(body) if self._family.bare == "python" else json_calls(body)


def _parsed(text: str, grammar: Any, prefix: str, tools: list[Any]) -> dict[str, Any]:
    """Return the fields of a text. grammar: loaded response template. prefix: text before it. tools: JSON objects of the functions.

    The text is fed in pieces. After every mark, the parser searches its buffer to the end, so in one piece, a long text with many marks
    would take time in proportion to the square of its length.
    """
    parser = ResponseParser(grammar, prefix=prefix, tools=tools)
    for at in range(0, len(text), _PIECE):
        parser.feed(text[at : at + _PIECE])
    found: dict[str, Any] = parser.finalize()[0]
    return found


def _from_fields(value: Any) -> Iterable[ToolCall]:
    given = value if isinstance(value, list) else [value]
    return [named_call(one["function"]["name"], one["function"]["arguments"]) for one in given]


def _holds_calls(name: str) -> bool:
    return name.startswith((CALLS, "tool_calls"))
