"""Tokenizer of `tiny`: one token per character, one per role, and one for the end of a turn.

Invariant: rendering is prefix-stable. The ids of a conversation are the concatenation of its messages' ids. A later
message never changes earlier ids, and a generated turn (its last id is `<|end|>`) can be kept as it is.
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

END = "<|end|>"
PAD = "<|pad|>"
UNKNOWN = "<|unknown|>"
ROLES = ("system", "user", "assistant", "tool")
_SPECIAL = (PAD, UNKNOWN, END, *(f"<|{role}|>" for role in ROLES))
_CHARACTERS = "\n" + string.digits + string.ascii_letters + string.punctuation + " "
VOCABULARY = {token: index for index, token in enumerate((*_SPECIAL, *_CHARACTERS))}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class TemplateMessage:
    """One message of a conversation; role is one of `ROLES`."""

    role: str
    content: str


def encode(conversation: Sequence[TemplateMessage]) -> tuple[list[int], list[bool]]:
    """Return a conversation's ids, and for each whether the assistant writes it (`<|end|>` included); both have length T."""
    ids: list[int] = []
    written: list[bool] = []
    for message in conversation:
        body = [VOCABULARY.get(character, VOCABULARY[UNKNOWN]) for character in message.content]
        ids += [VOCABULARY[f"<|{message.role}|>"], *body, VOCABULARY[END]]
        written += [False, *([message.role == "assistant"] * (len(body) + 1))]
    return ids, written


def save_tokenizer(folder: Path, max_tokens: int) -> None:
    """Write the tokenizer's files in Hugging Face format, with the chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(_SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[f"<|{role}|>" for role in ROLES],
        clean_up_tokenization_spaces=False,
        model_max_length=max_tokens,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
