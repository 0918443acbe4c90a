"""What a chat template writes around a reply: the header before it, the text that it begins, and the end after it.

Found from renderings of short conversations, never from the template's source. Imports transformers only when a folder's template is rendered.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

from marlaas.models.families import THINK, THINK_END
from marlaas.models.weight_files import read_json

PlainMessage = Mapping[str, Any]
Render = Callable[[Sequence[PlainMessage], bool], str]
"""Renders messages, with or without the generation prompt."""

_MARK = "Marlaas4Reply"
_USER: PlainMessage = {"role": "user", "content": "two and two?"}
_ASKED: tuple[tuple[PlainMessage, ...], ...] = ((_USER,), ({"role": "system", "content": "Answer."}, _USER))
_SAID: PlainMessage = {"role": "assistant", "content": _MARK}
_ANY_QUESTION: PlainMessage = {"role": "user", "content": "?"}
_PLAIN: PlainMessage = {"role": "assistant", "content": "x"}
_CALL = {"type": "function", "id": "call00000", "function": {"name": "any", "arguments": {}}}
_STRUCTURED: PlainMessage = {**_PLAIN, "reasoning_content": "y", "thinking": "y", "tool_calls": [_CALL]}
_EMPTY_BLOCK = re.compile(r"(?:<([\w:|]+)>\s*</\1>|\[(\w+)\]\s*\[/\2\])\s*\Z")
"""An empty block at the end of a header: a template's form of a message without reasoning."""
_OPEN_TAG = re.compile(r"[<\[][^>\]]*\Z")
_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class ReplyFrame:
    """The text around a reply.

    Attributes:
        header: what stands between the user's message and an assistant's message; empty if unknown.
        has_prompt: whether the generation prompt contains the header.
        opening: what the generation prompt writes after the header, as the beginning of the reply (`<think>` and a line end);
            empty if that is only white space.
        ending: what follows an assistant's message at the end of a conversation.
    """

    header: str = ""
    has_prompt: bool = True
    opening: str = ""
    ending: str = ""

    @property
    def problem(self) -> str:
        """A sentence about a template that ignores `add_generation_prompt`; empty if it does not."""
        if self.has_prompt:
            return ""
        return (
            f"the chat template ignores add_generation_prompt: it writes {self.header!r} before an assistant's message, and nothing for a "
            "reply, so a reply would continue the user's message; end the template with "
            f"{{% if add_generation_prompt %}}{{{{ {self.header!r} }}}}{{% endif %}}"
        )


def frame_of(render: Render) -> ReplyFrame:
    """Return the text around a reply; an empty frame for a template that refuses every conversation that is tried.

    Args:
        render: may raise any Exception, because a template's expressions can.
    """
    for asked in _ASKED:
        try:
            return _frame(render, asked)
        except Exception:  # Another conversation may do.
            continue
    return ReplyFrame()


def closing_token(frame: ReplyFrame, tokens: Mapping[str, int]) -> int | None:
    """Return the token that ends an assistant's message; None if the template ends it with other text, or with nothing.

    Args:
        tokens: the added tokens of the tokenizer and their ids.
    """
    ending = frame.ending.lstrip()
    found = max((token for token in tokens if token and ending.startswith(token)), key=len, default="")
    is_header = not found or frame.header.lstrip().startswith(found)  # The template always ends with a header.
    return None if is_header else tokens[found]


def reply_in(whole: str, prompt: str, opening: str, reasoning: str) -> str | None:
    """Return the text with which a rendered conversation ends beyond its last prompt: a reply, as the policy would generate it.

    Args:
        whole: the conversation with the reply.
        prompt: the conversation before it, with the generation prompt.
        opening: the end of `prompt` that begins the reply. A template that opens a reply's reasoning may drop it from messages.
        reasoning: of the reply.

    Returns:
        None if the template writes a reply in another way than it prompts for one.
    """
    if whole.startswith(prompt):
        return whole.removeprefix(prompt)
    header = prompt.removesuffix(opening)
    is_open = THINK in opening and THINK_END not in opening
    if not is_open or not whole.startswith(header) or THINK in whole.removeprefix(header):
        return None
    return f"{reasoning}\n{THINK_END}\n\n{whole.removeprefix(header)}"


def split_end(text: str, ends: Collection[str]) -> tuple[str, str | None]:
    """Split a rendered reply before its end token, one of `ends`; what the template writes after it is left out. None: it has no end token."""
    found = {end: at for end in ends if (at := text.rfind(end)) >= 0 and not text[at + len(end) :].strip()}
    if not found:
        return text, None
    end = max(found, key=found.__getitem__)
    return text[: found[end]], end


def without_empty_block(text: str, content: str) -> str:
    """Return a rendering up to an assistant's message without the empty block before the message, if the message has its own block.

    Args:
        text: ends with `content`.
    """
    if not text.endswith(content):
        return text
    before = text.removesuffix(content)
    found = _EMPTY_BLOCK.search(before)
    tag = found[0].partition(">" if found[1] else "]")[0] if found else ""
    return before[: found.start()] + content if found and content.lstrip().startswith(tag) else text


def renderer(folder: Path, template: str | None, kwargs: Mapping[str, Any]) -> Render | None:
    """Return a function that renders a template with a model's special tokens; None without a template or transformers. Raises NotAModel."""
    if template is None or find_spec("transformers") is None:
        return None
    from transformers.utils.chat_template_utils import render_jinja_template

    given = {**special_tokens(folder), **kwargs}

    def render(messages: Sequence[PlainMessage], prompts: bool) -> str:
        texts, _ = render_jinja_template(
            [list(messages)], chat_template=template, add_generation_prompt=prompts, **given
        )
        return str(texts[0])

    return render


def lost_tokens(render: Render, special: Collection[str]) -> str:
    """Return a sentence about special tokens that a template writes around reasoning and calls; empty if it writes none.

    Args:
        special: the special tokens of the tokenizer.
    """
    try:
        plain, structured = (render((_ANY_QUESTION, reply), True) for reply in (_PLAIN, _STRUCTURED))
    except Exception:  # A template's expressions can raise anything; then nothing is known.
        return ""
    lost = sorted(token for token in special if token and structured.count(token) > plain.count(token))
    if not lost:
        return ""
    return (
        f"the base model's chat template writes the special tokens {', '.join(lost)} into an assistant's message, and no "
        "known model family does: tool calls and reasoning would be lost. Put a `response_template` that reads them into the model's "
        "tokenizer_config.json (transformers, chat response parsing), or choose another template (`chatTemplate`), one that writes calls as "
        "<tool_call>{JSON}</tool_call>"
    )


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens that a tokenizer's configuration names, by their names (`eos_token`). Raises NotAModel."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", _CONFIG):
        if (folder / name).is_file():
            config |= read_json(folder / name)
    given = {name: config.get(name) for name in _SPECIAL_TOKENS}
    texts = {name: one.get("content") if isinstance(one, dict) else one for name, one in given.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def own_template(folder: Path) -> str | None:
    """Return the source of a folder's template, of several the default one. Raises NotAModel."""
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    for name in ("chat_template.json", _CONFIG):
        found = read_json(folder / name).get("chat_template") if (folder / name).is_file() else None
        if isinstance(found, list):
            named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
            found = named.get("default")
        if isinstance(found, str):
            return found
    return None


def _frame(render: Render, asked: Sequence[PlainMessage]) -> ReplyFrame:
    prompt, plain = render(asked, True), render(asked, False)
    last, _, ending = render((*asked, _SAID), False).rpartition(_MARK)
    earlier = render((*asked, _SAID, _USER), False).partition(_MARK)[0]
    # A template may write an empty block of reasoning into the last message only, or into every message.
    begin = min((_EMPTY_BLOCK.sub("", one) for one in (last, earlier)), key=len)
    if not last:
        return ReplyFrame()
    header = begin.removeprefix(plain) if begin.startswith(plain) else ""
    ignores = prompt == plain and bool(header.strip())
    return ReplyFrame(header, not ignores, _opening(prompt, begin, plain), ending)


def _opening(prompt: str, begin: str, plain: str) -> str:
    common = _common(prompt, begin)
    if common != begin:  # Another tag than the message's follows the header.
        common = _OPEN_TAG.sub("", common)
    is_known = len(common) >= len(_common(prompt, plain))
    opening = prompt[len(common) :]
    return opening if is_known and opening.strip() else ""


def _common(one: str, other: str) -> str:
    """Return the longest common beginning of two texts."""
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    return one[:length]
