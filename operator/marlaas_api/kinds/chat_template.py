"""Chat template of a pool or of a job (docs/reference/models.md, Chat templates)."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, model_validator

from marlaas_api.kinds.base import Spec, matching, rules

_FILE_OR_NAME = "give at most one of file and name"
_ONE_SOURCE = "give at most one of file, name and text"
_FILE = r"^([A-Za-z0-9_-][A-Za-z0-9_.-]*/)*[A-Za-z0-9_-][A-Za-z0-9_.-]*$"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_GIVEN_BY_US = frozenset(
    [
        "messages",
        "tools",
        "documents",
        "conversation",
        "conversations",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "tokenizer_kwargs",
        "self",
        "bos_token",
        "eos_token",
        "unk_token",
        "pad_token",
        "raise_exception",
        "strftime_now",
    ]
)
_MAX_VALUE = 1024


def _variables(kwargs: dict[str, Any]) -> dict[str, Any]:
    for key, value in kwargs.items():
        if not _VARIABLE.fullmatch(key):
            raise ValueError(f"{key!r} is not the name of a template's variable: use letters, digits and _")
        if key in _GIVEN_BY_US:
            raise ValueError(f"{key} is not an argument of a template: the workers pass it with every conversation")
        if value is not None and not isinstance(value, bool | int | float | str):
            raise ValueError(f"{key} must be a number, a text, true, false or null")
        if len(str(value)) > _MAX_VALUE:
            raise ValueError(f"{key} has {len(str(value))} characters, at most {_MAX_VALUE} are allowed")
    return kwargs


class ChatTemplateSpec(Spec):
    """Chat template of a job: the Jinja text that turns messages into the text of a prompt. Without file and name it is the pool's.

    A job cannot bring a text of its own: it would run in the engine's process, whose time and memory all tenants share.
    """

    model_config = ConfigDict(json_schema_extra=rules(("!has(self.file) || !has(self.name)", _FILE_OR_NAME)))
    file: (
        Annotated[str, matching(_FILE, "a path inside the model's folder, for example chat_template_tools.jinja", 256)]
        | None
    ) = Field(None, description="File in the model's folder, for example chat_template_tools.jinja. Absent: no file.")
    name: Literal["chatml", "hermes"] | None = Field(
        None,
        description="Builtin template, for a base model without one. chatml: messages between <|im_start|> and <|im_end|>; a tokenizer without <|im_end|> ends "
        "them with its end token. hermes: chatml with tools, called as <tool_call>{JSON}</tool_call>. Absent: none.",
    )
    kwargs: Annotated[dict[str, Any], AfterValidator(_variables)] = Field(
        default_factory=dict,
        description="Variables that the template reads, for example enable_thinking: false; each is a number, a text, a truth value or null. Those of a job "
        "are added to the pool's and replace those of the same name. By default empty.",
        max_length=32,
    )

    @property
    def is_given(self) -> bool:
        """Whether anything is set."""
        return bool(self.model_dump(exclude_defaults=True))

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [key for key in ("file", "name", "text") if getattr(self, key, None) is not None]
        if len(given) > 1:
            allowed = _ONE_SOURCE if isinstance(self, PoolChatTemplateSpec) else _FILE_OR_NAME
            raise ValueError(f"{allowed}; found {' and '.join(given)}")
        return self


class PoolChatTemplateSpec(ChatTemplateSpec):
    """Chat template of a pool, as `ChatTemplateSpec`, or a text. Without file, name and text it is the model's own."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("[has(self.file), has(self.name), has(self.text)].filter(given, given).size() <= 1", _ONE_SOURCE)
        )
    )
    text: Annotated[str, StringConstraints(min_length=1, max_length=64 << 10)] | None = Field(
        None, description="The Jinja text itself. Absent: no text."
    )
