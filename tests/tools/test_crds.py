"""The generated CustomResourceDefinitions: structural, current, and of one mind with the kinds; and their page, docs/reference/api.md."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field
from tests.crds.table import parts, schema

from marlaas_api.kinds import KINDS
from marlaas_api.kinds.status import CONDITIONS
from tools import api_docs, crd, structural

CRDS = Path(__file__).parents[2] / "crds"
Schema = dict[str, Any]
DOCS = Path(__file__).parents[2] / "docs/reference/api.md"


def _all_parts() -> Iterator[tuple[str, Schema]]:
    for kind in KINDS:
        for path, part in parts(schema(kind)):
            yield f"{kind.__name__}.{path}", part


def _rules(schema: Schema) -> list[str]:
    return [rule["rule"] for rule in schema.get("x-kubernetes-validations", ())]


def test_check_fails_on_a_difference_and_passes_after_writing(tmp_path, capsys):
    crd.write(tmp_path)
    assert crd.main([str(tmp_path), "--check"]) == 0
    (tmp_path / "marlaas.dev_tenants.yaml").write_text("other", encoding="utf-8")
    (tmp_path / "marlaas.dev_gone.yaml").write_text("of no kind", encoding="utf-8")
    assert crd.main([str(tmp_path), "--check"]) == 1
    said = capsys.readouterr().err
    assert "marlaas.dev_tenants.yaml is not what marlaas_api.kinds gives: run `make crds`" in said
    assert "marlaas.dev_gone.yaml" in said
    assert crd.main([str(tmp_path)]) == 0
    assert crd.stale(tmp_path) == []


def test_schemas_hold_nothing_that_a_structural_schema_may_not():
    for path, part in _all_parts():
        assert not {"$ref", "$defs", "title", "const", "oneOf", "allOf", "prefixItems"} & set(part), path
        assert "nullable" not in part or part.get("x-kubernetes-preserve-unknown-fields"), path
        assert part.get("additionalProperties") is not False, path
        assert isinstance(part.get("exclusiveMinimum", True), bool), path
        assert ("properties" in part) + ("additionalProperties" in part) < 2, path
        if "anyOf" in part:
            assert part["x-kubernetes-int-or-string"] is True, path


def test_only_arguments_of_environments_and_data_sets_variables_of_a_chat_template_and_affinity_are_free():
    free = [path for path, part in _all_parts() if part.get("x-kubernetes-preserve-unknown-fields")]
    given = (
        "RLJob.spec.agents[].initFrom.sft.data{} RLJob.spec.environment.args{} RLJob.spec.rollout.chatTemplate.kwargs{}"
    )
    given += " RLJob.spec.evaluation.suites[].environment.args{}"
    given += " ModelPool.spec.chatTemplate.kwargs{}"
    assert free == [*given.split(), "ModelPool.spec.rollout.affinity{}", "ModelPool.spec.trainer.affinity{}"]


@pytest.mark.parametrize(("bound", "sign"), [("minimum", ">"), ("maximum", "<")])
def test_every_fractional_bound_of_a_number_is_a_rule_too(bound, sign):
    """The API server converts a bound to the type of the value: `minimum: 0.01` is 0 for an integer."""
    for path, part in _all_parts():
        if part.get("type") == "number" and not float(part.get(bound, 0)).is_integer():
            wanted = {f"self {sign}= {part[bound]}", f"self {sign} {part[bound]}"}
            assert wanted & {*_rules(part)}, path


def _bounded(**bounds: float) -> Schema:
    """Schema of a field with bounds that no field of the kinds has yet."""

    class Bounded(BaseModel):
        value: float = Field(**bounds)  # type: ignore[arg-type]

    whole = Bounded.model_json_schema()
    return structural.structural(whole["properties"]["value"], {})


def test_a_fractional_bound_is_left_out_of_the_schema_where_the_server_would_refuse_an_integer_that_keeps_it():
    """For the integer 0 the server reads `0.5, exclusive` as `0, exclusive`."""
    part = _bounded(gt=-0.5, lt=0.5)
    assert not {"exclusiveMinimum", "exclusiveMaximum"} & part.keys()
    assert _rules(part) == ["self > -0.5", "self < 0.5"]
    assert (part["minimum"], part["maximum"]) == (-0.5, 0.5)


def test_everything_is_bounded_so_that_rules_have_a_cost_that_the_api_server_can_know():
    for path, part in _all_parts():
        if part.get("type") == "string" and ".spec" in path:
            assert "maxLength" in part or "enum" in part, path
        if part.get("type") == "array":
            assert "maxItems" in part, path
        if "additionalProperties" in part:
            assert "maxProperties" in part, path


def test_a_transition_rule_stands_only_where_the_field_is_always_there():
    """The API server skips a rule with oldSelf when the field appears or disappears."""
    for path, part in _all_parts():
        always = part.get("required", [])
        for name, child in part.get("properties", {}).items():
            if any("oldSelf" in rule for rule in _rules(child)):
                assert "default" in child or name in always, f"{path}.{name}"


def test_a_stale_page_is_found_and_written_anew(tmp_path, capsys):
    page = tmp_path / "api.md"
    assert api_docs.main([str(page), "--check"]) == 1
    assert "run `make crds`" in capsys.readouterr().err
    assert api_docs.main([str(page)]) == 0
    assert page.read_text(encoding="utf-8") == DOCS.read_text(encoding="utf-8"), "the committed page"
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
