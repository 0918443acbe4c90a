"""The chat template in effect: the text that `chatTemplate` of a pool and a job choose, its variables, and errors in it.

Imports jinja2 only when a text is checked or rendered.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from marlaas.models.chat_template import Render, own_template, special_tokens
from marlaas.models.end_tokens import added_tokens
from marlaas_api.errors import InvalidInput
from marlaas_api.messages.job_spec import PoolChatTemplateSettings

_END = "<|im_end|>"
_BEGINNING = "{% if bos_token and bos_token not in ('<|im_start|>', eos_token) %}{{ bos_token }}{% endif %}"
_REPLY = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_HERMES_TOOLS = (
    "{% set first = messages[0] if messages and messages[0].role == 'system' else {'content': ''} %}"
    "{% if tools %}<|im_start|>system\n{% if first.content %}{{ first.content }}\n\n{% endif %}You may call these functions:\n<tools>\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\nCall a function with a JSON object:\n<tool_call>\n"
    '{"name": <name of the function>, "arguments": <its arguments>}\n</tool_call><|im_end|>\n{% endif %}'
)
_HERMES_MESSAGES = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% elif not (tools and m.role == 'system' and loop.first) %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first else '' }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}'
)
_BUILTIN = {
    "chatml": _BEGINNING
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + _REPLY,
    "hermes": _BEGINNING + _HERMES_TOOLS + _HERMES_MESSAGES + _REPLY,
}
_ALWAYS_GIVEN = frozenset(
    (
        *("messages", "add_generation_prompt", "bos_token", "eos_token", "unk_token", "pad_token"),
        *("raise_exception", "strftime_now"),
    )
)


class TemplateUnusable(InvalidInput):
    """The chosen chat template does not exist, or Jinja cannot parse it."""


@dataclass(frozen=True, slots=True)
class ChosenTemplate:
    """A chat template.

    Attributes:
        text: its Jinja text; None if the model has none, or several of which transformers chooses.
        kwargs: variables that it reads.
        is_own: whether it is the model's own.
        is_builtin: whether it is one of ours. Then a `response_template` of the model's tokenizer does not fit it.
    """

    text: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_own: bool = True
    is_builtin: bool = False

    @property
    def with_kwargs(self) -> str | None:
        """The text, with the variables as its defaults, for readers that pass none."""
        if self.text is None:
            return None
        given = (
            f"{{%- if {key} is not defined %}}{{%- set {key} = {_literal(value)} %}}{{%- endif -%}}"
            for key, value in sorted(self.kwargs.items())
        )
        return "".join(given) + self.text


def choose(settings: PoolChatTemplateSettings, folder: Path) -> ChosenTemplate:
    """Return the template that settings choose for a model's folder. Raises TemplateUnusable, NotAModel."""
    kwargs = settings.kwargs.value
    if settings.name is not None:
        text = _builtin(settings.name, added_tokens(folder), special_tokens(folder).get("eos_token"))
        return ChosenTemplate(text, kwargs, is_own=False, is_builtin=True)
    if settings.file is None and settings.text is None:
        return ChosenTemplate(own_template(folder), kwargs)
    text = settings.text if settings.text is not None else _read(folder, str(settings.file))
    if (error := syntax_error(text)) is not None:
        raise TemplateUnusable(error)
    return ChosenTemplate(text, kwargs, is_own=False)


def syntax_error(text: str) -> str | None:
    """Return a sentence with the line that Jinja cannot parse; None if it can parse the text, or is not installed."""
    if find_spec("jinja2") is None:
        return None
    from jinja2 import TemplateSyntaxError

    try:
        _parsed(text)
    except TemplateSyntaxError as error:
        return f"line {error.lineno} of the chat template is not valid Jinja: {error.message}"
    return None


def unread(chosen: ChosenTemplate) -> str | None:
    """Return a sentence about variables that a template never reads; None if it reads all of them."""
    if not chosen.kwargs or chosen.text is None or find_spec("jinja2") is None:
        return None
    from jinja2.meta import find_undeclared_variables

    known = find_undeclared_variables(_parsed(chosen.text)) - _ALWAYS_GIVEN
    lost = sorted(set(chosen.kwargs) - known)
    if not lost:
        return None
    return f"the template does not read {', '.join(lost)}; it reads {', '.join(sorted(known)) or 'no variables'}"


def _builtin(name: str, tokens: Collection[str], end: str | None) -> str:
    """Return a builtin template. A tokenizer without its end token ends messages with its own one, so that one token ends a reply."""
    text = _BUILTIN[name]
    return text if _END in tokens or end is None else text.replace(_END, end)


def _read(folder: Path, name: str) -> str:
    file = folder / name
    if not file.is_file():
        there = sorted(one.relative_to(folder).as_posix() for one in folder.rglob("*.jinja"))
        raise TemplateUnusable(f"the model's folder has no file {name}; it has {', '.join(there) or 'no *.jinja file'}")
    return file.read_text(encoding="utf-8", errors="replace")


def _literal(value: object) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def light_renderer(folder: Path, chosen: ChosenTemplate) -> Render | None:
    """Return a function that renders messages without importing transformers; None without a template.

    It is for counts: transformers' own environment, without tools and documents. Raises NotAModel.
    """
    if chosen.text is None:
        return None
    environment = _environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
    template = environment.from_string(chosen.text)
    given = {**special_tokens(folder), **chosen.kwargs}
    return lambda messages, prompts: str(
        template.render(messages=list(messages), add_generation_prompt=prompts, **given)
    )


def _raise(text: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(text)


def _parsed(text: str) -> Any:
    """Parse a template with the extensions that transformers has. Raises jinja2.TemplateSyntaxError."""
    return _environment().parse(text)


def _environment(**options: bool) -> Any:
    """Return Jinja's environment with the extensions that transformers has."""
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`, which marks an assistant's message."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares a set

        def parse(self, parser: Any) -> Any:
            """Return the statements inside."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return ImmutableSandboxedEnvironment(extensions=[Generation, "jinja2.ext.loopcontrols"], **options)
