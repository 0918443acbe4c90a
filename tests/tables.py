"""Tables of cases that are data: `cases.yaml` beside the tests that read them."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml


@cache
def _tables(folder: Path) -> dict[str, Any]:
    """Read a file once: the pure parser took most of the time in which pytest collects."""
    tables: dict[str, Any] = yaml.load((folder / "cases.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
    return tables


def data(test_file: str, name: str) -> Any:
    """A value of the file as it is written there."""
    return copy.deepcopy(_tables(Path(test_file).parent)[name])


def rows(test_file: str, name: str) -> list[Any]:
    """The rows of a table for `parametrize`; a row with several columns is a list. The keys of a mapping are the ids."""
    table = data(test_file, name)
    if isinstance(table, dict):
        return [pytest.param(*row, id=key) for key, row in table.items()]
    return list(table)
