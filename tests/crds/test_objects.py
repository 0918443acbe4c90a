"""The kinds on a real API server: what it stores, shows and explains; and every example is taken as it stands."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.crds.conftest import Api, problems
from tests.crds.table import parts, schema
from tests.tables import rows

from marlaas_api.kinds import API_VERSION, KINDS, Kind
from marlaas_api.kinds.problems import parse

STORED = Path(__file__).parents[1] / "api/fixtures/v1alpha1"
Json = dict[str, Any]
SAYS_NOTHING_IS_MEANT = re.compile(r"Absent|empty|none\b.* by default|Refused:")
"""How a field without a default says what it means that it is not there."""

UNITS = (
    (re.compile(r"seconds", re.I), "seconds?\\b"),
    (re.compile(r"bytes$|^memory$|^maxMemory$|^storage$", re.I), "bytes\\b"),
    (re.compile(r"^cpu$"), "cores\\b"),
    (re.compile(r"[tT]okens|^maxModelLen$"), "tokens\\b"),
)
"""Field names that speak of an amount, and the word that their texts need."""
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.yaml"))


def _fixture(kind: type[Kind], size: str) -> Json:
    return yaml.safe_load((STORED / f"{kind.__name__.lower()}-{size}.yaml").read_text(encoding="utf-8"))


@pytest.fixture(
    params=[(kind, size) for kind in KINDS for size in ("minimal", "full")],
    ids=lambda pair: f"{pair[0].__name__}-{pair[1]}",
)
def given(request: pytest.FixtureRequest) -> Json:
    return _fixture(*request.param)


@pytest.fixture
def full(api: Api) -> Iterator[None]:
    """The full object of each kind, status included."""
    bodies = [_fixture(kind, "full") for kind in KINDS]
    for body in bodies:
        assert problems(api.create(body)) == set()
        assert problems(api.patch(body["kind"], "full", {"status": body["status"]}, status=True, dry=False)) == set()
    yield
    for body in bodies:
        api.delete(body["kind"], "full")


def _without_nothing(value: Any) -> Any:
    """What says nothing left out: absent, empty and null mean the same outside free-form arguments."""
    if isinstance(value, dict):
        small = {key: item if key in ("args", "affinity") else _without_nothing(item) for key, item in value.items()}
        return {key: item for key, item in small.items() if item not in (None, [], {}, "")}
    return [_without_nothing(item) for item in value] if isinstance(value, list) else value


def test_the_server_stores_what_a_worker_would_assume(api, given):
    kind = next(kind for kind in KINDS if kind.__name__ == given["kind"])
    stored = api.create(given, dry=True)
    assert problems(stored) == set()
    mine = parse(kind, given).model_dump(mode="json", by_alias=True)["spec"]
    assert _as_text(_without_nothing(stored["spec"])) == _as_text(_without_nothing(mine))
    assert parse(kind, stored).spec == parse(kind, given).spec  # type: ignore[attr-defined]


def _as_text(spec: Json) -> Json:
    """With a CPU quantity that was given as a number written as text."""
    spec = copy.deepcopy(spec)
    for workers in (spec.get("rollout", {}), spec.get("trainer", {})):
        if "cpu" in workers:
            workers["cpu"] = str(workers["cpu"])
    return spec


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("kind", KINDS)
def test_a_status_is_stored_whole(api, kind):
    assert api.get(kind.__name__, "full")["status"] == _fixture(kind, "full")["status"]


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize(("name", "narrow", "wide", "cells"), rows(__file__, "columns"))
def test_kubectl_get_shows_these_columns(api, name, narrow, wide, cells):
    table = api.table(name)
    columns = table["columnDefinitions"]
    assert [column["name"] for column in columns if column["priority"] == 0] == narrow
    assert [column["name"] for column in columns if column["priority"] > 0] == wide
    (row,) = table["rows"]
    assert [cell for column, cell in zip(columns, row["cells"], strict=True) if column["name"] != "Age"] == cells


@pytest.mark.usefixtures("full")
def test_one_word_lists_everything_of_marlaas(plane):
    listed = plane.kubectl("get", "marlaas", "-o", "name").split()
    assert sorted(listed) == ["modelpool.marlaas.dev/full", "rljob.marlaas.dev/full", "tenant.marlaas.dev/full"]


def fields(kind: type[Kind]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Every field of spec and status: its path, its schema, whether it must be given."""
    for path, part in parts(schema(kind)):
        for name, field in part.get("properties", {}).items():
            if path.startswith(("spec", "status")):
                yield f"{path}.{name}", field, name in part.get("required", ())


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_says_what_it_means_and_every_amount_its_unit(kind):
    for path, field, _ in fields(kind):
        words, name = field.get("description", ""), path.rpartition(".")[2]
        units = [unit for known, unit in UNITS if known.search(name)]
        assert words.strip(), path
        assert all(re.search(unit, words, re.I) for unit in units), f"{path}: {words}"
        assert units or not field.get("x-kubernetes-int-or-string"), f"{path}: a quantity of which unit?"


@pytest.mark.parametrize("kind", KINDS)
def test_what_need_not_be_given_says_what_it_is_then(kind):
    """By a default at the end of its text, or in words; an object that is filled in says it field by field."""
    for path, field, required in fields(kind):
        if not path.startswith("spec") or required or field.get("default") == {}:
            continue
        if "default" in field:
            assert re.search(r" Default: \S.*\.$", field["description"]), path
        else:
            assert SAYS_NOTHING_IS_MEANT.search(field["description"]), f"{path}: {field['description']}"


def _ours(path: Path) -> bool:
    return f"apiVersion: {API_VERSION}" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [path for path in EXAMPLES if _ours(path)], ids=lambda path: path.stem)
def test_every_example_is_taken_as_kubectl_reads_it(plane, api, path):
    """But for its namespace, which is not made here."""
    for body in _objects(plane.kubectl("create", "--dry-run=client", "--output=json", "-f", path)):
        if body["apiVersion"] == API_VERSION:
            body["metadata"].pop("namespace", None)
            assert problems(api.create(body, dry=True)) == set(), body["metadata"]["name"]


def _objects(text: str) -> Iterator[Any]:
    """JSON objects one after the other, as kubectl prints them."""
    while text := text.strip():
        body, end = json.JSONDecoder().raw_decode(text)
        yield body
        text = text[end:]
