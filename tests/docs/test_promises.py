"""The generator of the guarantees finds files and tests that are not there."""

from pathlib import Path

import pytest

from tools import promises_page

SOURCE = """
[[promise]]
id = "one"
title = "One"
guarantee = "It is so."
made = ["tools/promises_page.py", "tools/nowhere.py"]
proof = [
  "tests/docs/test_promises.py::{here}",
  "tests/docs/test_promises.py::test_that_is_nowhere",
  "tests/docs/test_pages.py::{here}",
  "tests/docs/test_nowhere.py",
]
"""
HERE = "test_a_missing_file_and_a_missing_test_are_reported_and_a_moved_one_with_its_place"


def test_a_missing_file_and_a_missing_test_are_reported_and_a_moved_one_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "promises.toml"
    source.write_text(SOURCE.format(here=HERE))
    monkeypatch.setattr(promises_page, "SOURCE", source)
    assert list(promises_page.missing()) == [
        "one: no file tools/nowhere.py",
        "one: no test tests/docs/test_promises.py::test_that_is_nowhere",
        f"one: no test tests/docs/test_pages.py::{HERE}; it is in tests/docs/test_promises.py",
        "one: no test tests/docs/test_nowhere.py",
    ]
    page = tmp_path / "promises.md"
    assert promises_page.main([str(page)]) == 1
    assert "tools/promises.toml: one: no file" in capsys.readouterr().err
