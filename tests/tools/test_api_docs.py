"""docs/reference/api.md: current, whole, and its links go somewhere."""

from pathlib import Path

import pytest
from tests.crds.table import parts, schema

from marlaas_api.kinds import KINDS
from marlaas_api.kinds.status import CONDITIONS
from tools import api_docs

DOCS = Path(__file__).parents[2] / "docs/reference/api.md"


def test_check_fails_on_a_difference_and_passes_after_writing(tmp_path, capsys):
    page = tmp_path / "api.md"
    assert api_docs.main([str(page), "--check"]) == 1
    assert "run `make crds`" in capsys.readouterr().err
    assert api_docs.main([str(page)]) == 0
    assert api_docs.main([str(page), "--check"]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_default_and_rule_is_told(kind):
    section = api_docs.section(kind)
    for path, part in parts(schema(kind)):
        name = path.rpartition(".")[2].strip("[]{}")
        assert path.startswith("metadata") or "." not in path or f"`{name}`" in section, path
        for rule in part.get("x-kubernetes-validations", ()):
            told = (
                any(words in rule["message"] for words in (" is refused: ", "cannot change"))
                or rule["message"] in section
            )
            assert told, rule["message"]
    assert all(f"| {type_} | " in section for type_ in CONDITIONS[kind.__name__])
