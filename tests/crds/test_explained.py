"""What `kubectl explain` prints of every field: its meaning, its unit, and what it is when nobody says anything."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from tests.crds.table import parts, schema

from marlaas_api.kinds import KINDS, Kind

SAYS_NOTHING_IS_MEANT = re.compile(r"Absent|empty|none\b.* by default|Refused:")
"""How a field without a default says what it means that it is not there."""

UNITS = (
    (re.compile(r"seconds", re.I), "seconds?\\b"),
    (re.compile(r"bytes$|^memory$|^maxMemory$|^storage$", re.I), "bytes\\b"),
    (re.compile(r"^cpu$"), "cores\\b"),
    (re.compile(r"[tT]okens|^maxModelLen$"), "tokens\\b"),
)
"""Field names that speak of an amount, and the word that their texts need."""


def fields(kind: type[Kind]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Every field of spec and status: its path, its schema, whether it must be given."""
    for path, part in parts(schema(kind)):
        for name, field in part.get("properties", {}).items():
            if path.startswith(("spec", "status")):
                yield f"{path}.{name}", field, name in part.get("required", ())


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_says_what_it_means_and_every_amount_its_unit(kind: type[Kind]) -> None:
    for path, field, _ in fields(kind):
        words, name = field.get("description", ""), path.rpartition(".")[2]
        units = [unit for known, unit in UNITS if known.search(name)]
        assert words.strip(), path
        assert all(re.search(unit, words, re.I) for unit in units), f"{path}: {words}"
        assert units or not field.get("x-kubernetes-int-or-string"), f"{path}: a quantity of which unit?"


@pytest.mark.parametrize("kind", KINDS)
def test_what_need_not_be_given_says_what_it_is_then(kind: type[Kind]) -> None:
    """By a default at the end of its text, or in words; an object that is filled in says it field by field."""
    for path, field, required in fields(kind):
        if not path.startswith("spec") or required or field.get("default") == {}:
            continue
        if "default" in field:
            assert re.search(r" Default: \S.*\.$", field["description"]), path
        else:
            assert SAYS_NOTHING_IS_MEANT.search(field["description"]), f"{path}: {field['description']}"
