"""Model families: how a family writes reasoning and tool calls in its replies, and how it is recognised.

A family is recognised by words of its chat template and by tokens of its tokenizer. The first entry of `FAMILIES` that
fits is the model's; a model that fits none is read as `CHATML`. Its replies are parsed by transformers' response templates
(`transformers.utils.chat_parsing`), which `Family.grammar` holds: literals and patterns of transformers' `regex` module.

Standard library only, because `marlaas validate` uses it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

Grammar = Mapping[str, Any]
"""The fields of a response template. Those whose name begins with `calls` hold tool calls."""
THINK, THINK_END = "<think>", "</think>"
CALLS = "calls"
_TEXT = {"content_args": {"strip": False}, "repeats": True}
_CONTENT = {**_TEXT, "join": ""}
_NAMED = {"function": {"name": "{name}", "arguments": "{content}"}}


def _thinking(start: str, end: str) -> dict[str, Any]:
    return {"open": start, "close": end, **_TEXT, "join": "\n"}


def _calls(start: str, end: str, **more: Any) -> dict[str, Any]:
    """Return a field of calls. A start with a group `name` is a pattern, as the end is then."""
    keys = ("open_pattern", "close_pattern") if "?P<name>" in start else ("open", "close")
    shape = {"transform": _NAMED} if "?P<name>" in start else {}
    return {keys[0]: start, keys[1]: end, **_TEXT, **shape, **more}


def _tags(pattern: str) -> dict[str, Any]:
    return {"content": "xml-inline", "content_args": {"tag_pattern": pattern}}


_THINK = _thinking(THINK, THINK_END)
_JSON_TAGS = {"reasoning": _THINK, CALLS: _calls("<tool_call>", "</tool_call>"), "content": _CONTENT}


@dataclass(frozen=True, slots=True)
class Family:
    """One family.

    Attributes:
        name: for people, as `marlaas validate` prints it.
        words: all of them are in the family's chat templates.
        tokens: all of them are tokens of its tokenizers.
        grammar: see `Grammar`.
        bare: the form of calls without a mark around them, when the whole content is calls of known tools: `json`, `python` or empty.
    """

    name: str
    words: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    grammar: Grammar = field(default_factory=lambda: MappingProxyType(_JSON_TAGS))
    bare: str = "json"

    def fits(self, template: str, tokens: Collection[str] | None) -> bool:
        """Return whether a model is of this family. tokens: None if they are not known."""
        has_tokens = tokens is None or all(token in tokens for token in self.tokens)
        return has_tokens and all(word in template for word in self.words)


CHATML = Family("ChatML", words=("<|im_start|>",))
"""For plain ChatML models, and for models of no known family."""

FAMILIES = (
    Family(
        "gpt-oss (harmony)",
        words=("<|channel|>", "<|message|>"),
        tokens=("<|channel|>", "<|message|>"),
        grammar={
            "reasoning": _thinking("<|channel|>analysis<|message|>", "<|end|>"),
            CALLS: _calls(
                r" to=(?:functions\.)?(?P<name>[\w.-]{1,128})[^<]{0,64}(?:<\|channel\|>[^<]{0,64})?(?:<\|constrain\|>[^<]{0,64})?<\|message\|>",
                r"<\|(?:call|end)\|>",
            ),
            "content": {
                "open_pattern": r"<\|channel\|>(?:final|commentary)(?: ?<\|constrain\|>[^<]{0,64})?<\|message\|>",
                "close_pattern": r"<\|(?:end|return)\|>",
                **_TEXT,
                "join": "\n",
            },
        },
        bare="",
    ),
    Family(
        "DeepSeek",
        words=("<｜tool▁call▁begin｜>",),
        tokens=("<｜tool▁call▁begin｜>",),
        grammar={
            "reasoning": _THINK,
            CALLS: _calls(
                r"<｜tool▁call(?:s▁begin｜>\s*<｜tool▁call)?▁begin｜>"
                r"(?:function<｜tool▁sep｜>(?P<name>[^\n<]{1,128})\n```json\n|(?P<name>[^\n<]{1,128})<｜tool▁sep｜>)",
                r"(?:\n```)?<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
            ),
            "content": _CONTENT,
        },
        bare="",
    ),
    Family(
        "GLM-4.5",
        words=("<arg_key>", "<|assistant|>"),
        grammar={
            "reasoning": _THINK,
            CALLS: _calls(
                r"<tool_call>\s*(?P<name>[^\s<]{1,128})",
                "</tool_call>",
                **_tags(
                    r"<arg_key>(?P<key>[^<]{1,128})</arg_key>\s*<arg_value>(?P<value>(?:(?!<arg_key>).)*?)</arg_value>"
                ),
            ),
            "content": _CONTENT,
        },
        bare="",
    ),
    Family(
        "Qwen3-Coder",
        words=("<tool_call>", "<function="),
        grammar={
            "reasoning": _THINK,
            CALLS: _calls(
                r"<tool_call>\s*<function=(?P<name>[^>\s]{1,128})>",
                r"</function>\s*(?:</tool_call>)?",
                **_tags(r"<parameter=(?P<key>[^>]{1,128})>\n?(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>"),
            ),
            "content": _CONTENT,
        },
        bare="",
    ),
    Family("Qwen3", words=("<tool_call>", THINK, "<|im_start|>")),
    Family("Hermes (Qwen2.5)", words=("<tool_call>", "<|im_start|>")),
    Family(
        "Llama 4 (pythonic)",
        tokens=("<|python_start|>", "<|python_end|>"),
        words=("<|header_start|>",),
        grammar={CALLS: _calls("<|python_start|>", "<|python_end|>"), "content": _CONTENT},
        bare="python",
    ),
    Family("pythonic (ToolACE)", words=("[func_name1(",), grammar={"content": _CONTENT}, bare="python"),
    Family(
        "Llama 3",
        words=("<|start_header_id|>",),
        tokens=("<|python_tag|>",),
        grammar={CALLS: {"open": "<|python_tag|>", **_TEXT}, "content": _CONTENT},
    ),
    Family(
        "Mistral",
        words=("[TOOL_CALLS]",),
        tokens=("[TOOL_CALLS]",),
        grammar={
            "reasoning": _thinking("[THINK]", "[/THINK]"),
            CALLS: _calls(r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:\[CALL_ID\][\w-]*)?\[ARGS\]", r"(?=\[TOOL_CALLS\])"),
            "calls_listed": {"open": "[TOOL_CALLS]", **_TEXT},
            "content": _CONTENT,
        },
    ),
    Family(
        "Gemma 4",
        words=("<|channel>", "<|tool_call>"),
        tokens=("<|channel>", "<|tool_call>"),
        grammar={
            "reasoning": {
                "open_pattern": r"<\|channel>thought\n?",
                "close_pattern": r"<channel\|>",
                **_TEXT,
                "join": "\n",
            },
            CALLS: _calls(
                r"<\|tool_call>\s*call:(?P<name>[\w.-]+)",
                r"<tool_call\|>",
                content="json",
                content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            ),
            "content": _CONTENT,
        },
        bare="",
    ),
    Family(
        "FunctionGemma",
        words=("<start_function_call>",),
        tokens=("<start_function_call>",),
        grammar={
            CALLS: _calls(
                r"<start_function_call>\s*call:(?P<name>[\w.-]+)",
                "<end_function_call>",
                content="json",
                content_args={"unquoted_keys": True, "string_delims": [["<escape>", "<escape>"]]},
            ),
            "content": _CONTENT,
        },
        bare="",
    ),
    Family("Gemma", words=("<start_of_turn>",), grammar={"content": _CONTENT}),
    Family(
        "Phi-4-mini",
        words=("<|tool_call|>", "<|assistant|>"),
        tokens=("<|tool_call|>",),
        grammar={CALLS: _calls("<|tool_call|>", "<|/tool_call|>"), "content": _CONTENT},
    ),
    Family("Phi-4", words=("<|im_sep|>",), grammar={"reasoning": _THINK, "content": _CONTENT}),
    Family("DeepSeek-R1", words=("<｜Assistant｜>",), grammar={"reasoning": _THINK, "content": _CONTENT}),
    CHATML,
)


def family_of(template: str, tokens: Collection[str] | None) -> Family | None:
    """Return the family of a model; None if it is of no known one.

    Args:
        template: the text of its chat template.
        tokens: its added tokens; None if they are not known.
    """
    return next((family for family in FAMILIES if family.fits(template, tokens)), None)
