"""Whatever stands in a manifest, the answer is a sentence with a line, never a traceback."""

import copy
import re
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from marlaas.manifest.documents import read_documents
from marlaas.manifest.objects import File, Objects, read_objects

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
OBJECTS = [document.value for document in read_documents(EXAMPLE.read_text(encoding="utf-8"))]
LINE = re.compile(r"^fuzz\.yaml:[1-9][0-9]*: \S")

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(["", "~", "1e9", "tiny"])
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
)


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, item in items for place in _places(item, (*at, key)))]


def _replaced(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    changed = copy.copy(value)
    changed[place[0]] = _replaced(value[place[0]], place[1:], new)
    return changed


def _added(value: Any, key: str, new: Any) -> Any:
    return {**value, key: new} if isinstance(value, dict) else [*value, new] if isinstance(value, list) else new


@st.composite
def bodies(draw: st.DrawFn) -> Any:
    body = draw(st.sampled_from(OBJECTS))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(_places(body)))
        new = draw(values)
        if draw(st.booleans()):
            inner: Any = body
            for key in place:
                inner = inner[key]
            new = _added(inner, draw(st.text(max_size=6)), new)
        body = _replaced(body, place, new)
    return body


def _findings(text: str) -> list[str]:
    objects = Objects()
    read_objects(File("fuzz.yaml", Path("/"), text), objects)
    return [str(finding) for finding in objects.errors]


@settings(max_examples=60, deadline=None)
@given(bodies())
def test_a_mutated_object_is_taken_or_told_with_a_line(body: Any) -> None:
    for line in _findings(yaml.safe_dump(body, allow_unicode=True)):
        assert LINE.match(line) or line == "fuzz.yaml: contains no objects", line
        assert "pydantic" not in line
        assert "Input should" not in line


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.sampled_from(list("ab:- \n\t{}[]&*!<>'\"#?|%@\\1.~")), max_size=40))
def test_any_text_is_taken_or_told(text: str) -> None:
    for line in _findings(text):
        assert LINE.match(line) or line == "fuzz.yaml: contains no objects", line
