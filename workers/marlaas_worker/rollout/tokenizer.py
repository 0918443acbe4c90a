"""Adapter for transformers' tokenizers: a pool's tokenizer, loaded once, with one chat template."""

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from marlaas.models.chat_template import PlainMessage, ReplyFrame, closing_token, frame_of, without_empty_block
from marlaas.models.chosen_template import choose
from marlaas.models.end_tokens import TEMPLATE, TOKENIZER, EndTokens, configured_ends
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import ChatMessage, ReplyPartsMessage, ToolCallMessage
from marlaas_api.messages.job_spec import ChatTemplateSettings, PoolChatTemplateSettings
from marlaas_worker.rollout.conversation import CHANGES_BEGINNING, BadAppend, NoChatTemplate
from marlaas_worker.rollout.renderer import Renderer

NO_TEMPLATE = "the base model has no chat template: choose a chat model, set `chatTemplate: {name: chatml}`, or have the environment append raw text (`agent.complete`) instead of messages"
_TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions that the expressions of a template may raise."""
_Render = Callable[[Sequence[ChatMessage], Sequence[str]], str]
_ANY_TOOL = json.dumps(
    {
        "type": "function",
        "function": {"name": "any", "description": "", "parameters": {"type": "object", "properties": {}}},
    }
)


def vocabulary_digest(ids: Mapping[str, int]) -> str:
    """Return the sha256 (hex) of a vocabulary. ids: the id of each token, by the token's text."""
    return hashlib.sha256(json.dumps(sorted(ids.items())).encode()).hexdigest()


class TokenizerUnreadable(InvalidInput):
    """The pool's model folder has no tokenizer that transformers can load."""


class PretrainedTokenizer:
    """Tokenizer and chat template of a Hugging Face folder. Implements `conversation.Tokenizer` and `replies.EndingTokenizer`.

    Attributes:
        frame: the text that the chat template writes around a reply.
        ends: the tokens that end a reply, by their source: the model's configuration files, the tokenizer or the chat template.
        end_ids: the ids of all tokens in `ends`.
        folder: the model's folder; set by `load`.
        settings: the chat template settings in use, with a job's settings merged over the pool's.

    Args:
        tokenizer: transformers' tokenizer, with the chat template.
        configured: end tokens that the model's configuration files name; None: none.
        kwargs: variables that the template reads; None: none.
    """

    def __init__(
        self, tokenizer: Any, configured: EndTokens | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._configured = configured or EndTokens()
        self._kwargs = dict(kwargs or {})
        self.folder = Path()
        self.settings = PoolChatTemplateSettings()
        self.frame = ReplyFrame() if tokenizer.chat_template is None else frame_of(self._plainly_rendered)
        tokens: dict[str, int] = tokenizer.get_added_vocab()
        ends = replace(self._configured, texts={number: text for text, number in tokens.items()})
        self.ends = ends.found(TOKENIZER, tokenizer.eos_token_id).found(TEMPLATE, closing_token(self.frame, tokens))
        self.end_ids = self.ends.ids

    @classmethod
    def load(cls, model_path: str, template: PoolChatTemplateSettings | None = None) -> "PretrainedTokenizer":
        """Load a model folder's tokenizer; takes seconds. Raises TokenizerUnreadable, TemplateUnusable, TemplateRefused.

        Args:
            model_path: a folder in Hugging Face format.
            template: the pool's choice of a chat template; None: the model's own.
        """
        try:
            own = cls(AutoTokenizer.from_pretrained(model_path), configured_ends(Path(model_path)))
        except (OSError, ValueError) as error:
            raise TokenizerUnreadable(f"no tokenizer in {model_path}: {error}") from error
        own.folder = Path(model_path)
        if template is not None and template != PoolChatTemplateSettings():
            return own._using(template)
        own.check_template()
        return own

    def for_job(self, template: ChatTemplateSettings) -> "PretrainedTokenizer":
        """Return a copy of this tokenizer with a job's chat template in place of the pool's (`replies.EndingTokenizer.for_job`).

        Raises TemplateUnusable, TemplateRefused.
        """
        return self._using(template.over(self.settings))

    def _using(self, settings: PoolChatTemplateSettings) -> "PretrainedTokenizer":
        chosen = choose(settings, self.folder)
        tokenizer = copy.copy(self._tokenizer)
        if not chosen.is_own:
            tokenizer.chat_template = chosen.text
        if chosen.is_builtin:
            tokenizer.response_template = None
        made = PretrainedTokenizer(tokenizer, self._configured, chosen.kwargs)
        made.folder, made.settings = self.folder, settings
        made.check_template()
        return made

    def check_template(self) -> None:
        """Raise TemplateRefused if the template writes tool calls or reasoning with special tokens that the renderer cannot parse."""
        self.renderer.check(self._plainly_rendered)

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[str] = ()) -> str:
        """Render messages as a prompt (`conversation.Tokenizer.render`). Raises BadAppend with the template's error text."""
        return self._checked(messages, tools, self._rendered)

    def whole(self, messages: Sequence[ChatMessage], tools: Sequence[str] = ()) -> str:
        """Render messages that end with a complete reply (`replies.EndingTokenizer.whole`). Raises BadAppend with the template's error text."""
        return self._checked(messages, tools, self._wholly_rendered)

    def _checked(self, messages: Sequence[ChatMessage], tools: Sequence[str], render: _Render) -> str:
        if self._tokenizer.chat_template is None:
            raise NoChatTemplate(NO_TEMPLATE)
        if tools and not self.shows_tools:
            raise BadAppend("the base model's chat template shows no tools: describe them in a system message instead")
        try:
            return render(messages, tools)
        except _TEMPLATE_ERRORS as error:
            raise BadAppend(f"the base model's chat template refuses these messages: {error}") from error

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template's output depends on the tools."""
        messages = (ChatMessage(role="user", content="?"),)
        try:
            return self._rendered(messages, (_ANY_TOOL,)) != self._rendered(messages, ())
        except _TEMPLATE_ERRORS:
            return True  # Then `render` raises the template's own error for the actual messages.

    def _rendered(self, messages: Sequence[ChatMessage], tools: Sequence[str]) -> str:
        plain, shown = [_plain(message) for message in messages], [json.loads(tool) for tool in tools] or None
        if not messages or messages[-1].role != "assistant" or messages[-1].tool_calls:
            return self._plainly_rendered(plain, True, shown)
        try:
            text = self._plainly_rendered(plain, False, shown, continue_final_message=True)
        except ValueError as error:  # The library's text contains the whole rendering.
            raise BadAppend(CHANGES_BEGINNING) from error
        return without_empty_block(text, messages[-1].content)

    def _wholly_rendered(self, messages: Sequence[ChatMessage], tools: Sequence[str]) -> str:
        shown = [json.loads(tool) for tool in tools] or None
        text = self._plainly_rendered([_plain(message) for message in messages], False, shown)
        ending = self.frame.ending
        if not ending or not text.endswith(ending) or messages[-1].tool_calls:
            return text
        return without_empty_block(text.removesuffix(ending), messages[-1].content) + ending

    def _plainly_rendered(
        self, messages: Sequence[PlainMessage], prompts: bool, tools: list[Any] | None = None, **options: bool
    ) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=prompts, **options, **self._kwargs
            )
        )

    @cached_property
    def vocabulary(self) -> str:
        """Digest of all tokens and their ids (`replies.EndingTokenizer.vocabulary`)."""
        return vocabulary_digest(self._tokenizer.get_vocab())

    @cached_property
    def begin_ids(self) -> tuple[int, ...]:
        """The special tokens that the tokenizer puts before a text, such as BOS (`conversation.Tokenizer.begin_ids`)."""
        ids, text = list(self._tokenizer.encode("a", add_special_tokens=True)), self.encode("a")
        places = (at for at in range(len(ids)) if ids[at : at + len(text)] == text)
        return tuple(ids[: next(places, 0)])

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    @cached_property
    def renderer(self) -> Renderer:
        """The renderer of the model's family, which parses replies."""
        return Renderer.of(self._tokenizer)

    def decode(self, ids: Sequence[int]) -> str:
        return self.renderer.text(ids)

    def raw(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def special_id(self, text: str) -> int | None:
        added = self._tokenizer.added_tokens_decoder.items()
        return next((int(number) for number, token in added if token.special and str(token) == text), None)

    def past(self, text: str, before: str, tools: Sequence[str]) -> Sequence[ChatMessage]:
        return self.renderer.past(text, before, tools)

    def parts(self, ids: Sequence[int], before: str, tools: Sequence[str]) -> ReplyPartsMessage | None:
        """Parse a reply's ids, without the end token (`renderer.Renderer.parts`)."""
        return self.renderer.parts(ids, before, tools)

    def token_text(self, token: int) -> str:
        return self.raw([token])


def _plain(message: ChatMessage) -> dict[str, Any]:
    """Convert a message to the form that chat templates read: tool arguments as an object, absent fields left out."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning_content:  # Templates differ in the name.
        plain["reasoning_content"] = plain["thinking"] = message.reasoning_content
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    return plain


def _plain_call(call: ToolCallMessage) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    return {"type": "function", "id": call.id, "function": function}
