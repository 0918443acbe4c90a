"""Tables of cases that are data: `cases.yaml` beside the tests that read them."""

from pathlib import Path
from typing import Any

import pytest
import yaml


def data(test_file: str, name: str) -> Any:
    """A value of the file as it is written there."""
    return yaml.safe_load((Path(test_file).parent / "cases.yaml").read_text(encoding="utf-8"))[name]


def rows(test_file: str, name: str) -> list[Any]:
    """The rows of a table for `parametrize`; a row with several columns is a list. The keys of a mapping are the ids."""
    table = data(test_file, name)
    if isinstance(table, dict):
        return [pytest.param(*row, id=key) for key, row in table.items()]
    return list(table)
