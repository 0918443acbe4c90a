"""`kubectl explain` of every field: its meaning, its unit, and what it is when nobody says anything."""

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.crds.table import parts, schema

from marlaas_api.kinds import KINDS, Kind
from marlaas_api.kinds.base import expected_text
from marlaas_e2e.control_plane import ControlPlane
from marlaas_e2e.kubectl import CommandFailed

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


def words_of(kind: type[Kind]) -> Iterator[tuple[str, str]]:
    for path, field, _ in fields(kind):
        yield path, field.get("description", "")


@pytest.fixture(scope="module")
def explaining(plane: ControlPlane) -> ControlPlane:
    """The API server, once it says what it serves: that follows a moment after the kinds are established."""
    until = time.monotonic() + 30
    while True:
        try:
            for kind in KINDS:
                plane.kubectl("explain", kind.__name__.lower())
            return plane
        except CommandFailed:
            assert time.monotonic() < until, "kubectl cannot explain the kinds"
            time.sleep(0.2)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_says_what_it_means(kind: type[Kind]) -> None:
    assert [path for path, words in words_of(kind) if not words.strip()] == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_amount_says_its_unit(kind: type[Kind]) -> None:
    silent = [
        f"{path}: {words}"
        for path, words in words_of(kind)
        for name, unit in UNITS
        if name.search(path.rpartition(".")[2]) and not re.search(unit, words, re.I)
    ]
    assert silent == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_quantity_is_an_amount_with_a_unit(kind: type[Kind]) -> None:
    quantities = [path for path, field, _ in fields(kind) if field.get("x-kubernetes-int-or-string")]
    unknown = [path for path in quantities if not any(name.search(path.rpartition(".")[2]) for name, _ in UNITS)]
    assert unknown == []


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


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("rljob.spec.agents", "Default: [{name: policy}]."),
        ("rljob.spec.agents.adapter.rank", "Default: 8."),
        ("rljob.spec.agents.trainable", "Default: true."),
        ("rljob.spec.environment.turnTimeoutSeconds", "for a replica that restarts is not counted. Default: 120."),
        ("rljob.spec.training.groupsPerStep", "Default: 8."),
        ("rljob.spec.training.optimizer.learningRate", "Default: 0.0001."),
        ("rljob.spec.training.optimizer.betas", "Default: [0.9, 0.999]."),
        ("rljob.spec.suspend", "Default: false."),
        ("rljob.spec.backoffLimit", "Default: 6."),
        ("modelpool.spec.rollout.kvCacheBytes", "Default: 512Mi."),
        ("modelpool.spec.model.pvc.path", "Default: /."),
        ("tenant.spec.weight", "Default: 1."),
    ],
)
def test_kubectl_itself_tells_the_default(explaining: ControlPlane, path: str, sentence: str) -> None:
    """Its template has no place for a schema's default: only what the description says is printed."""
    assert sentence in " ".join(explaining.kubectl("explain", path).split())


@pytest.mark.parametrize("kind", KINDS)
def test_every_pattern_has_words(kind: type[Kind]) -> None:
    """What a text must look like is told by sentences, too, not by its expression alone."""
    for path, part in parts(schema(kind)):
        if "pattern" in part and path.startswith("spec"):
            assert not expected_text(part["pattern"]).startswith("text like"), path
