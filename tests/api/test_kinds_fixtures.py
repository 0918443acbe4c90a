"""Objects as they were stored once must be read for ever: nothing of `fixtures/v1alpha1` may be changed, only added to."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from marlaas_api.kinds import KINDS
from marlaas_api.kinds.problems import parse

STORED = sorted((Path(__file__).parent / "fixtures/v1alpha1").glob("*.yaml"))
BY_NAME = {kind.__name__: kind for kind in KINDS}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every field that an object says something of; free-form arguments as one."""
    if isinstance(value, dict) and value and not path.endswith((".args", ".affinity")):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for at, item in enumerate(value):
            yield from _leaves(item, f"{path}[{at}]")
    else:
        yield path, value


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_what_was_stored_once_is_read_with_every_field(path):
    body = yaml.safe_load(path.read_text(encoding="utf-8"))
    read = parse(BY_NAME[body["kind"]], body).model_dump(mode="json", by_alias=True)
    again = dict(_leaves(read))
    for field, value in _leaves(body):
        assert again[field] == (str(value) if field.endswith(".cpu") else value), field


def test_there_is_a_smallest_and_a_full_object_of_each_kind():
    wanted = {f"{name.lower()}-{size}" for name in BY_NAME for size in ("minimal", "full")}
    assert wanted <= {path.stem for path in STORED}
