"""Odd values at random places: the API server and the kinds say the same, and what the server has stored can always be read."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.crds.client import Api, problems
from tests.crds.table import complaint, integers_around, parts, put, schema

from marlaas_api.kinds import KINDS, Kind
from marlaas_api.kinds.problems import InvalidObject, parse

STORED = Path(__file__).parents[1] / "api/fixtures/v1alpha1"
OBJECTS = 600
WHOLE_FRACTION = 3.0
"""The server takes 3.0 for a whole number and stores 3; a manifest that says it probably means something else."""

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 1.5, -0.5, 1e300, 2**53, 2**63, 10**30, WHOLE_FRACTION),
    *(
        "",
        " a",
        "a\n",
        "x" * 300,
        *["a", "A", "a.b", "a/b", "é", "٣", "1", "0", "-1", "1e3", "1Gi", "1_000", "0x10", "1."],
    ),
    *[
        "10.0.0.0/8",
        "10.0.0.0/08",
        "010.0.0.1/32",
        "::ffff:169.254.1.1/128",
        "169.254.0.0/15",
        "fe80::/9",
        "fe80::%e/64",
    ],
    *([], [1], ["a"], ["a", "a"], [None], {}, {"a": 1}, {"name": "a"}, [{"name": "a"}], [{}]),
)


def _places(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place in an object's spec, but those that only the pods' own API server looks into."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        if key != "affinity":
            yield (*at, key)
            yield from _places(child, (*at, key))


def _integers(kind: type[Kind], chance: random.Random) -> list[tuple[str, int]]:
    """(path, integer) for every number that stands in no list, at, below and above its bounds; in any order."""
    numbers = [(path, part) for path, part in parts(schema(kind)) if part.get("type") == "number" and "[]" not in path]
    pairs = [(path, integer) for path, part in numbers if path.startswith("spec") for integer in integers_around(part)]
    return chance.sample(pairs, len(pairs))


def _changed(body: dict[str, Any], chance: random.Random) -> tuple[object, object]:
    """Put one odd value somewhere, or take something away; place and value, for the failure's text."""
    place = chance.choice([at for at in _places(body) if at[0] == "spec" and len(at) > 1] or [("spec",)])
    holder: Any = body
    for step in place[:-1]:
        holder = holder[step]
    if chance.random() < 0.12:
        del holder[place[-1]]
        return place, "taken away"
    holder[place[-1]] = copy.deepcopy(chance.choice(ODD))
    return place, holder[place[-1]]


def _complaint(kind: type[Kind], body: dict[str, Any]) -> str:
    try:
        parse(kind, body)
    except InvalidObject as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_the_server_and_the_kinds_are_of_one_mind(api: Api, kind: type[Kind]) -> None:
    chance = random.Random(kind.__name__)
    paths = sorted(STORED.glob(f"{kind.__name__.lower()}-*.yaml"))
    bodies = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in paths]
    integers = _integers(kind, chance)
    for _ in range(OBJECTS // len(KINDS)):
        body = copy.deepcopy(chance.choice(bodies))
        done: list[tuple[object, object]] = []
        if integers:
            path, integer = integers.pop()
            put(body, path, integer)
            done.append((path, integer))
        changes = chance.choice((0, 0, 1) if done else (1, 1, 2))
        done += [_changed(body, chance) for _ in range(changes)]
        answer, said = api.create(body, dry=True), _complaint(kind, body)
        if problems(answer):
            assert complaint(kind, body), f"the kinds take {done}, the server says {problems(answer)}"
        else:
            assert _complaint(kind, answer) == "", f"what was stored of {done} cannot be read"
            assert not said or f"found {WHOLE_FRACTION}" in said, f"the server takes {done}"
