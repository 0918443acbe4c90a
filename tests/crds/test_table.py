"""Every bound, pattern, enumeration, default and rule of the kinds, tried on a real API server: `cases/` is the table.

The same values are given to the kinds themselves: a worker and the operator must read what the server stores, and `marlaas validate` must not
take what the server refuses.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.crds.conftest import Api, problems
from tests.crds.table import (
    TABLES,
    Case,
    Row,
    Table,
    complaint,
    constraints,
    covered,
    integers_around,
    parts,
    put,
    schema,
    take,
    told_at,
)

from marlaas_api.kinds import KINDS, Kind
from marlaas_api.kinds.problems import InvalidObject, parse

ROWS = [row for table in TABLES.values() for row in table.rows]
TRIED = [row for row in ROWS if any(name != "changes" for name in row.cases)]
FIXED = "cannot change once the job exists; delete the job and create a new one"
EXISTING = "existing"
_CHANGEABLE = "training.steps priority suspend activeDeadlineSeconds ttlSecondsAfterFinished backoffLimit"
CHANGEABLE = {f"spec.{field}" for field in _CHANGEABLE.split()}
NUMBERS = [
    (kind, path, part)
    for kind in KINDS
    for path, part in parts(schema(kind))
    if part.get("type") == "number" and path.startswith("spec") and {"minimum", "maximum"} & part.keys()
]
WRONG = {"string": 7, "integer": "seven", "number": "seven", "boolean": "maybe", "array": {}, "object": []}


def _tries(row: Row) -> Iterator[Case]:
    yield from (case for name, cases in row.cases.items() if name != "changes" for case in cases)


def _taken(kind: type[Kind], body: dict[str, Any]) -> bool:
    """Whether the kinds themselves take an object."""
    try:
        parse(kind, body)
    except InvalidObject:
        return False
    return True


def _assert_kinds_refuse(table: Table, path: str, body: dict[str, Any]) -> None:
    """What was refused must not be taken by the kinds either; of a status, which only the operator writes, they believe more."""
    assert path.startswith("status") or complaint(table.kind, body), path


@pytest.fixture(scope="module")
def existing(api: Api) -> Iterator[None]:
    """One smallest object of each kind, for writes of a status and for changes."""
    for table in TABLES.values():
        assert problems(api.create({**table.smallest, "metadata": {"name": EXISTING}})) == set()
    yield
    for table in TABLES.values():
        api.delete(table.kind.__name__, EXISTING)


def _ask(api: Api, table: Table, path: str, body: dict[str, Any]) -> set[tuple[str, str]]:
    """What the server says of the object; of its status, when the field is there."""
    if path.startswith("status"):
        return problems(api.patch(table.kind.__name__, EXISTING, {"status": body["status"]}, status=True))
    return problems(api.create(body, dry=True))


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_the_kinds_themselves_take_and_refuse_what_the_table_says(table):
    for row in table.rows:
        for case in _tries(row):
            accepted = [table.object_with(row.path, value) for value in case.accept]
            assert all(_taken(table.kind, body) for body in accepted), row
            refused = table.object_with(row.path, case.refuse)
            _assert_kinds_refuse(table, row.path, refused)
            if not row.path.startswith("status"):
                assert complaint(table.kind, refused) not in {complaint(table.kind, body) for body in accepted}, row


@pytest.mark.parametrize("row", TRIED, ids=str)
@pytest.mark.usefixtures("existing")
def test_what_the_table_accepts_is_taken_and_what_it_refuses_is_refused_in_those_words(api, row):
    table = TABLES[row.kind]
    for case in _tries(row):
        for value in case.accept:
            assert _ask(api, table, row.path, table.object_with(row.path, value)) == set(), value
        body = table.object_with(row.path, case.refuse)
        told = _ask(api, table, row.path, body)
        assert any(field.startswith(told_at(row.path)) and case.says in text for field, text in told), (case, told)


@pytest.mark.parametrize(("kind", "path", "part"), NUMBERS, ids=[f"{kind.__name__}.{at}" for kind, at, _ in NUMBERS])
@pytest.mark.usefixtures("existing")
def test_an_integer_is_held_to_every_bound_of_a_number(api, kind, path, part):
    """At, below and above each bound: the server reads a bound as a value of the type that it bounds, so that 0.01 becomes 0."""
    table = TABLES[kind.__name__]
    for integer in integers_around(part):
        body = table.object_with(path, integer)
        told = _ask(api, table, path, body)
        assert (told == set()) == _taken(kind, body), (integer, told)


@pytest.mark.parametrize("row", [row for row in ROWS if row.required], ids=str)
@pytest.mark.usefixtures("existing")
def test_what_is_required_must_be_there(api, row):
    table = TABLES[row.kind]
    for name in row.required:
        body = table.object_for(f"{row.path}.{name}")
        if take(body, row.path) is None:
            put(body, row.path, {})
        take(body, row.path).pop(name, None)
        told = _ask(api, table, row.path, body)
        assert (f"{told_at(row.path)}.{name}", "Required value") in told
        _assert_kinds_refuse(table, row.path, body)


@pytest.mark.parametrize("row", [row for row in ROWS if row.default is not None], ids=str)
def test_what_is_absent_gets_its_default(api, row):
    table = TABLES[row.kind]
    stored = api.create(table.object_for(row.path), dry=True)
    whole = take(stored, row.path)
    assert ([{"name": one["name"]} for one in whole] if row.path == "spec.agents" else whole) == row.default


@pytest.mark.parametrize("row", [row for row in ROWS if "changes" in row.cases], ids=str)
def test_what_may_not_change_is_refused_by_the_server_itself(api, row):
    table, kind = TABLES[row.kind], row.kind
    for at, case in enumerate(row.cases["changes"]):
        body = table.object_with(row.path, case.before)
        name = body["metadata"]["name"] = f"change-{at}"
        assert problems(api.create(body)) == set()
        try:
            put(body, row.path, case.accept[0])
            assert problems(api.replace(body, dry=True)) == set()
            put(body, row.path, case.refuse)
            told = problems(api.replace(body, dry=True))
            assert any(field == told_at(row.path) and text.endswith(case.says) for field, text in told), (case, told)
        finally:
            api.delete(kind, name)


@pytest.mark.parametrize(
    "row",
    [row for row in TRIED if row.kind == "RLJob" and row.path.startswith("spec.") and row.path not in CHANGEABLE],
    ids=str,
)
@pytest.mark.usefixtures("existing")
def test_of_a_job_that_exists_nothing_else_changes(api, row):
    """Each accepted value of each field, put into a job that has another."""
    table = TABLES[row.kind]
    stored = api.get(row.kind, EXISTING)["spec"]
    tried = 0
    for value in (value for case in _tries(row) for value in case.accept):
        body = table.object_with(row.path, value)
        if api.create(body, dry=True)["spec"] == stored:
            continue
        tried += 1
        body["metadata"]["name"] = EXISTING
        told = problems(api.replace(body, dry=True))
        assert any(FIXED in text for _, text in told), (value, told)
    assert tried, "the table accepts no other value than that of the smallest job"


def test_the_table_has_every_constraint_of_the_schemas_and_no_other():
    for kind in KINDS:
        have, want = covered(TABLES[kind.__name__]), constraints(kind)
        assert sorted(want - have) == [], f"{kind.__name__}: constraints without a case in tests/crds/cases"
        assert sorted(have - want) == [], f"{kind.__name__}: cases of constraints that there are no more"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("existing")
def test_a_value_of_another_type_is_refused_everywhere(api, kind):
    table = TABLES[kind.__name__]
    for path, part in parts(schema(kind)):
        if not path.startswith(("spec", "status")) or "type" not in part:
            continue
        body = table.object_with(path, WRONG[part["type"]])
        told = _ask(api, table, path, body)
        expected = f"must be of type {'date-time' if part.get('format') == 'date-time' else part['type']}"
        assert any(field == told_at(path) and expected in text for field, text in told), (path, told)
        _assert_kinds_refuse(table, path, body)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("existing")
def test_an_unknown_field_is_refused_everywhere_and_pruned_for_clients_that_do_not_ask(api, kind):
    table = TABLES[kind.__name__]
    for path, part in parts(schema(kind)):
        if "properties" not in part or not path.startswith("spec"):
            continue
        at = f"{path}.zzz"
        body = table.object_for(at)
        if take(body, path) is None:
            put(body, path, {})
        put(body, at, 1)
        ((_, told),) = problems(api.create(body, dry=True))
        assert f'unknown field "{told_at(at)}"' in told
        pruned = api.create(body, dry=True, fields="Ignore")
        assert pruned["kind"] == "Status" or take(pruned, at) is None
        assert not _taken(kind, body), at
