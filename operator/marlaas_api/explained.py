"""Descriptions for `kubectl explain`, which shows a field's description but not its default: append the default."""

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]


def explained(schema: Schema) -> Schema:
    """Return the schema with each default value appended to its field's description; empty objects are left out."""
    told = dict(schema)
    if "properties" in told:
        told["properties"] = {name: explained(part) for name, part in told["properties"].items()}
    for inside in ("items", "additionalProperties"):
        if isinstance(told.get(inside), dict):
            told[inside] = explained(told[inside])
    if told.get("default", {}) != {}:
        told["description"] = f"{told['description'].rstrip()} Default: {value_text(told['default'])}."
    return told


def value_text(value: object) -> str:
    """Format a value as YAML writes it on one line; large numbers have spaces between thousands."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(value_text(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {value_text(item)}' for key, item in value.items())}}}"
    return number_text(value) if isinstance(value, int | float) else str(value)


def number_text(value: float) -> str:
    """Format a number for people: no `.0`, and spaces between thousands from 10 000 on."""
    return (
        f"{int(value):,}".replace(",", " ") if float(value).is_integer() and abs(value) >= 10_000 else f"{value:.16g}"
    )
