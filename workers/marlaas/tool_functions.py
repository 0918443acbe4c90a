"""The description of a Python function as a tool: its name, docstring and type hints as JSON schema. Standard library only.

The result is what `transformers.utils.get_json_schema` gives, so that a chat template shows a tool as the model's authors
trained it. Sandboxes have no transformers.
"""

import inspect
import json
import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from marlaas.environment_types import InvalidTurn

_SIMPLE: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
_SECTION = re.compile(r"^\s*(Args|Returns|Raises):[ \t]*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^\s*(\w+):", re.MULTILINE)
_CHOICES = re.compile(r"\s*\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def tool_of(function: Callable[..., object]) -> dict[str, Any]:
    """Return a function as `{"type": "function", "function": {…}}`.

    Each argument has a type hint and a line under `Args:` of the docstring; `(choices: ["a", "b"])` at the end of that line
    lists its values.

    Raises:
        InvalidTurn: a hint or a description is missing, or a hint has no JSON schema.
    """
    name = getattr(function, "__name__", type(function).__name__)
    description, sections = _sections(inspect.getdoc(function) or "")
    if not description:
        raise InvalidTurn(f"tool {name!r}: its function has no docstring, from which the model learns what it does")
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError) as error:
        raise InvalidTurn(f"tool {name!r}: its type hints cannot be read: {error}") from error
    parameters = dict(inspect.signature(function).parameters)
    if (first := next(iter(parameters), "")) in {"self", "cls"} and first not in hints:
        del parameters[first]
    said = _arguments(sections.get("Args", ""))
    properties = {}
    for argument in parameters:
        if argument not in hints or argument not in said:
            lacking = "a description under `Args:` of its docstring" if argument in hints else "a type hint"
            raise InvalidTurn(f"tool {name!r}: its argument {argument!r} needs {lacking}")
        properties[argument] = _described(name, _schema(name, hints[argument]), said[argument])
    required = [argument for argument, one in parameters.items() if one.default is inspect.Parameter.empty]
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    found = {
        "name": name,
        "description": description,
        "parameters": schema | ({"required": required} if required else {}),
    }
    if "return" in hints:
        returns = {"description": sections["Returns"]} if "Returns" in sections else {}
        found["return"] = _schema(name, hints["return"]) | returns
    return {"type": "function", "function": found}


def _sections(text: str) -> tuple[str, dict[str, str]]:
    """Return what a docstring says before its first section, and the text of each section."""
    description, *rest = _SECTION.split(text)
    return description.strip(), {title: body.strip() for title, body in zip(rest[::2], rest[1::2], strict=True)}


def _arguments(section: str) -> dict[str, str]:
    """Return the descriptions of arguments; one may take several lines."""
    _, *rest = _ARGUMENT.split(section)
    return {name: " ".join(text.split()) for name, text in zip(rest[::2], rest[1::2], strict=True)}


def _described(tool: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    if (choices := _CHOICES.search(text)) is None:
        return schema | {"description": text}
    try:
        return schema | {"enum": json.loads(choices[1]), "description": text[: choices.start()].strip()}
    except ValueError as error:
        raise InvalidTurn(f"tool {tool!r}: the choices {choices[1]!r:.80} are no JSON list: {error}") from error


def _schema(tool: str, hint: Any) -> dict[str, Any]:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _union(tool, inner)
    if origin is Literal:
        names = list(dict.fromkeys(_SIMPLE[type(value)]["type"] for value in inner))
        return {"type": names[0] if len(names) == 1 else names, "enum": list(inner)}
    if origin is list:
        return {"type": "array", "items": _schema(tool, inner[0])}
    if origin is tuple and len(inner) > 1 and ... not in inner:
        return {"type": "array", "prefixItems": [_schema(tool, one) for one in inner]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(tool, inner[1])}
    if origin is not None:
        raise InvalidTurn(f"tool {tool!r}: the type {hint} has no JSON schema; use list, dict, Literal or simple types")
    return dict(_SIMPLE.get(hint, {"type": "object"}))


def _union(tool: str, inner: tuple[Any, ...]) -> dict[str, Any]:
    """Return the schema of a union. None among its types is `nullable`, as templates of transformers expect."""
    schemas = [_schema(tool, one) for one in inner if one is not type(None)]
    if len(schemas) == 1:
        found = schemas[0]
    elif all(one.keys() == {"type"} and isinstance(one["type"], str) for one in schemas):
        names = sorted({one["type"] for one in schemas})
        found = {"type": names[0] if len(names) == 1 else names}
    else:
        found = {"anyOf": schemas}
    return found | ({"nullable": True} if type(None) in inner else {})
