"""docs/reference/api.md: current, whole, and its links go somewhere."""

import re
from pathlib import Path

import pytest
from tests.crds.table import parts, schema

from marlaas_api.kinds import KINDS, Kind
from marlaas_api.kinds.status import CONDITIONS
from tools import api_docs

DOCS = Path(__file__).parents[2] / "docs/reference/api.md"


def test_the_committed_page_is_what_the_kinds_give() -> None:
    assert DOCS.read_text(encoding="utf-8") == api_docs.page()


def test_check_fails_on_a_difference_and_passes_after_writing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "api.md"
    assert api_docs.main([str(page), "--check"]) == 1
    assert "run `make crds`" in capsys.readouterr().err
    assert api_docs.main([str(page)]) == 0
    assert api_docs.main([str(page), "--check"]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_default_and_rule_is_told(kind: type[Kind]) -> None:
    section = api_docs.section(kind)
    for path, part in parts(schema(kind)):
        name = path.rpartition(".")[2].strip("[]{}")
        assert path.startswith("metadata") or "." not in path or f"`{name}`" in section, path
        for rule in part.get("x-kubernetes-validations", ()):
            told = (
                rule["message"] in section or " is refused: " in rule["message"] or "cannot change" in rule["message"]
            )
            assert told, rule["message"]
    assert all(f"| {type_} | " in section for type_ in CONDITIONS[kind.__name__])


def test_every_link_goes_to_a_heading() -> None:
    page = api_docs.page()
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    anchors = {"".join(re.findall(r"[a-z0-9_-]", heading.lower())) for heading in headings}
    assert len(headings) == len(set(headings))
    assert set(re.findall(r"\(#([^)]+)\)", page)) <= anchors


def test_a_row_says_type_default_bounds_and_meaning() -> None:
    assert "| `groupSize` | integer | `8` | ≥ 1; ≤ 1024 | Episodes per task (G)" in api_docs.page()
    assert (
        "| `steps` | integer | **required** | ≥ 1; ≤ 10 000 000 | Number of optimizer steps to train; may be raised later. |"
        in api_docs.page()
    )
    assert (
        "| `seed` | integer | `0` | ≥ 0; ≤ 9 007 199 254 740 991 | Seed of task selection, sampling and initial adapter weights. Fixed. |"
        in api_docs.page()
    )
