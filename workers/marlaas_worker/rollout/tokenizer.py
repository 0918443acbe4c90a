"""Gateway to transformers' tokenizers: a pool's own tokenizer and chat template, read once."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from marlaas_api.errors import Permanent
from marlaas_api.messages import ChatMessage
from marlaas_worker.rollout.conversation import BadAppend


class TokenizerUnreadable(Permanent):
    """The pool's model folder has no tokenizer that transformers can read."""


class PretrainedTokenizer:
    """`conversation.Tokenizer` over a Hugging Face folder. `end_ids` end a reply."""

    def __init__(self, tokenizer: Any, end_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        own = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        self.end_ids = frozenset((*own, *end_ids))

    @classmethod
    def load(cls, model_path: str) -> "PretrainedTokenizer":
        """Read a model folder's tokenizer; takes a while. Raises TokenizerUnreadable."""
        try:
            return cls(AutoTokenizer.from_pretrained(model_path), _end_ids(Path(model_path)))
        except (OSError, ValueError) as error:
            raise TokenizerUnreadable(f"no tokenizer in {model_path}: {error}") from error

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The template's text with the generation prompt. Raises BadAppend in the template's own words."""
        if self._tokenizer.chat_template is None:
            raise BadAppend("the base model has no chat template: append raw text instead of messages")
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [_plain(message) for message in messages], tokenize=False, add_generation_prompt=True
                )
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise BadAppend(f"the base model's chat template refuses these messages: {error}") from error

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def token_text(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _end_ids(folder: Path) -> list[int]:
    """What the model itself says that it ends with, besides its tokenizer's end token."""
    config = folder / "generation_config.json"
    ends = json.loads(config.read_bytes()).get("eos_token_id") if config.exists() else None
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _plain(message: ChatMessage) -> dict[str, str]:
    named = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": message.content, **named}
