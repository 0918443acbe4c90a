"""docs/reference/api.md: current, whole, and its links go somewhere."""

from pathlib import Path

import pytest
from tests.crds.table import parts, schema

from marlaas_api.kinds import KINDS, Kind
from marlaas_api.kinds.status import CONDITIONS
from tools import api_docs

DOCS = Path(__file__).parents[2] / "docs/reference/api.md"


def test_check_fails_on_a_difference_and_passes_after_writing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "api.md"
    assert api_docs.main([str(page), "--check"]) == 1
    assert "run `make crds`" in capsys.readouterr().err
    assert api_docs.main([str(page)]) == 0
    assert page.read_text(encoding="utf-8") == DOCS.read_text(encoding="utf-8"), "the committed page"
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
