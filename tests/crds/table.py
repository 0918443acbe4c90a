"""The table of what the API server takes and refuses (`cases/`), and the constraints that a schema has, so that the two can be compared.

A path is that of `kubectl explain`, with `[]` for an entry of a list and `{}` for one of a mapping: `spec.agents[].name`.
"""

import copy
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from marlaas_api.kinds import KINDS, Kind, RLJob
from marlaas_api.kinds.agent_checks import check_agents
from marlaas_api.kinds.problems import InvalidObject, parse
from tools import crd

CASES = Path(__file__).parent / "cases"
ENTRY = "key"
"""Key under which an entry of a mapping is put."""

BOUNDS = ("minimum", "maximum", "minLength", "maxLength", "pattern", "minItems", "maxItems", "maxProperties", "format")
_STEP = re.compile(r"\.?([A-Za-z0-9]+|\[\]|\{\})")
Json = Any


class _Loader(yaml.SafeLoader):
    """YAML with tags for long values.

    `!text 5`: five letters; `!text 5 b/`: the first ones are b/. `!digits 5`: five digits. `!times [5, entry]`: a list of five entries, in which # is
    the number. `!mapping [5, value]`: five keys with this value.
    """


def _repeated(character: str) -> Callable[[yaml.SafeLoader, yaml.Node], str]:
    def construct(loader: yaml.SafeLoader, node: yaml.Node) -> str:
        assert isinstance(node, yaml.ScalarNode)
        length, _, begin = loader.construct_scalar(node).partition(" ")
        return begin + character * (int(length) - len(begin))

    return construct


def _times(loader: yaml.SafeLoader, node: yaml.Node) -> list[Json]:
    assert isinstance(node, yaml.SequenceNode)
    count, entry = loader.construct_sequence(node, deep=True)
    return [numbered(entry, at) for at in range(count)]


def _mapping(loader: yaml.SafeLoader, node: yaml.Node) -> dict[str, Json]:
    assert isinstance(node, yaml.SequenceNode)
    count, value = loader.construct_sequence(node, deep=True)
    return {f"key{at}": value for at in range(count)}


_Loader.add_constructor("!text", _repeated("a"))
_Loader.add_constructor("!digits", _repeated("1"))
_Loader.add_constructor("!times", _times)
_Loader.add_constructor("!mapping", _mapping)


def numbered(entry: Json, number: int) -> Json:
    """The entry with every # replaced by the number."""
    if isinstance(entry, dict):
        return {numbered(key, number): numbered(value, number) for key, value in entry.items()}
    return entry.replace("#", str(number)) if isinstance(entry, str) else entry


@dataclass(frozen=True, slots=True)
class Case:
    """One accepted and one refused value of a field, and what is said of the refused one. before: the value that an update replaces."""

    accept: tuple[Json, ...]
    refuse: Json
    says: str
    before: Json = None


@dataclass(frozen=True, slots=True)
class Row:
    """All that the table has of one field. cases: by constraint, `rules` and `changes` by the sentence."""

    kind: str
    path: str
    cases: dict[str, tuple[Case, ...]]
    required: tuple[str, ...]
    default: Json

    def __str__(self) -> str:
        return f"{self.kind}.{self.path}"


@dataclass(frozen=True, slots=True)
class Table:
    """What is known of one kind: a small object, what must stand beside a field, and the rows."""

    kind: type[Kind]
    smallest: dict[str, Json]
    given: dict[str, dict[str, Json]]
    rows: tuple[Row, ...]

    def object_for(self, path: str) -> dict[str, Json]:
        """The smallest object in which the field may be."""
        body = copy.deepcopy(self.smallest)
        for prefix, values in self.given.items():
            if path == prefix or path.startswith((f"{prefix}.", f"{prefix}[", f"{prefix}{{")):
                for at, value in values.items():
                    put(body, at, value)
        return body

    def object_with(self, path: str, value: Json) -> dict[str, Json]:
        body = self.object_for(path)
        put(body, path, value)
        return body


def load(kind: type[Kind]) -> Table:
    name = kind.__name__
    read = yaml.load((CASES / f"{name.lower()}.yaml").read_text(encoding="utf-8"), _Loader)
    rows = tuple(_row(name, path, row) for path, row in read["fields"].items())
    return Table(kind, read["object"], read["given"], rows)


def _row(kind: str, path: str, read: dict[str, Json]) -> Row:
    cases = {name: _cases(body) for name, body in read.items() if name not in ("required", "default")}
    return Row(kind, path, cases, tuple(read.get("required", ())), read.get("default"))


def _cases(read: Json) -> tuple[Case, ...]:
    if isinstance(read, list):
        return tuple(case for one in read for case in _cases(one))
    accept = read["each"] if "each" in read else [read["accept"]]
    return (Case(tuple(accept), read["refuse"], read["says"], read.get("from")),)


def put(body: dict[str, Json], path: str, value: Json) -> None:
    """Set what a path names; lists and mappings on the way must be there where the path goes into them."""
    *way, last = steps(path)
    here: Json = body
    for step in way:
        here = here.setdefault(step, {}) if isinstance(step, str) else here[step]
    here[last] = copy.deepcopy(value)


def take(body: Json, path: str) -> Json:
    """What stands at a path, None if nothing does."""
    for step in steps(path):
        body = body.get(step) if isinstance(step, str) else body[step] if body else None
        if body is None:
            return None
    return body


def steps(path: str) -> list[str | int]:
    """A path's keys and positions: the first entry of a list, the entry called `key` of a mapping."""
    entries: dict[str, str | int] = {"[]": 0, "{}": ENTRY}
    return [entries.get(step, step) for step in _STEP.findall(path)]


def told_at(path: str) -> str:
    """The path as the API server writes it."""
    return path.replace("[]", "[0]").replace("{}", f".{ENTRY}")


def schema(kind: type[Kind]) -> dict[str, Json]:
    return crd.definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def parts(part: dict[str, Json], path: str = "") -> Iterator[tuple[str, dict[str, Json]]]:
    """Every part of a schema with its path."""
    if path:
        yield path, part
    for name, child in part.get("properties", {}).items():
        yield from parts(child, f"{path}.{name}" if path else name)
    if "items" in part:
        yield from parts(part["items"], f"{path}[]")
    if isinstance(part.get("additionalProperties"), dict):
        yield from parts(part["additionalProperties"], f"{path}{{}}")


def integers_around(part: dict[str, Json]) -> list[int]:
    """Integers at, just below and just above each bound of a number."""
    limits = [part[bound] for bound in ("minimum", "maximum") if bound in part]
    whole = {number for limit in limits for number in (math.floor(limit), math.ceil(limit))}
    return sorted({number + step for number in whole for step in (-1, 0, 1)})


def constraints(kind: type[Kind]) -> set[tuple[str, str]]:
    """(path, constraint) of all that a kind's schema demands or fills in; a rule is named by its sentence."""
    return {(path, name) for path, part in parts(schema(kind)) for name in _of(part)}


def _of(part: dict[str, Json]) -> Iterator[str]:
    yield from (name for name in BOUNDS if name in part and part[name] != "int64")
    if "enum" in part:
        yield "enum"
    if part.get("default", {}) != {}:
        yield "default"
    if part.get("x-kubernetes-list-type") in ("map", "set"):
        yield part["x-kubernetes-list-type"]
    yield from (f"required {name}" for name in part.get("required", ()))
    yield from (rule["message"] for rule in part.get("x-kubernetes-validations", ()))


def complaint(kind: type[Kind], body: dict[str, Json]) -> str:
    """Return the first problem that the kinds, or the check of a job's agents, find in an object; empty without one."""
    try:
        parsed = parse(kind, body)
    except InvalidObject as error:
        return str(error)
    return next((str(one) for one in check_agents(parsed.spec)), "") if isinstance(parsed, RLJob) else ""


def covered(table: Table) -> set[tuple[str, str]]:
    """(path, constraint) of all that a table has a case of."""
    return {(row.path, name) for row in table.rows for name in _names(row)}


def _names(row: Row) -> Iterator[str]:
    for name, cases in row.cases.items():
        yield from (case.says for case in cases) if name in ("rules", "changes") else [name]
    yield from (f"required {name}" for name in row.required)
    if row.default is not None:
        yield "default"


TABLES = {kind.__name__: load(kind) for kind in KINDS}
