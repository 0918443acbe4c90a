"""The generated CustomResourceDefinitions: structural, current, and of one mind with the kinds."""

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, Field

from marlaas_api.kinds import KINDS, ModelPool, RLJob, Tenant
from marlaas_api.messages import Phase
from tools import crd, structural

CRDS = Path(__file__).parents[2] / "crds"
Schema = dict[str, Any]
CHANGEABLE = {
    "priority",
    "suspend",
    "activeDeadlineSeconds",
    "ttlSecondsAfterFinished",
    "backoffLimit",
}


@functools.cache
def _schema(kind: type) -> Schema:
    name = f"marlaas.dev_{crd.PRESENTATIONS[kind.__name__].plural}.yaml"
    version = yaml.safe_load(crd.files()[name])["spec"]["versions"][0]
    schema: Schema = version["schema"]["openAPIV3Schema"]
    return schema


def _parts(schema: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from _parts(part, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield from _parts(schema[name], f"{path}[]")


def _all_parts() -> Iterator[tuple[str, Schema]]:
    for kind in KINDS:
        yield from _parts(_schema(kind), kind.__name__)


def _rules(schema: Schema) -> list[str]:
    return [rule["rule"] for rule in schema.get("x-kubernetes-validations", ())]


def _with_defaults(value: Any, schema: Schema) -> Any:
    """What the API server makes of an object: absent fields get their defaults, inside out."""
    if isinstance(value, list):
        return [_with_defaults(item, schema["items"]) for item in value]
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    given = {name: part["default"] for name, part in schema["properties"].items() if "default" in part} | value
    return {name: _with_defaults(item, schema["properties"][name]) for name, item in given.items()}


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        small = {key: _without_empty(item) for key, item in value.items()}
        return {key: item for key, item in small.items() if item not in (None, [], {}, "")}
    return [_without_empty(item) for item in value] if isinstance(value, list) else value


def test_the_committed_files_are_what_the_kinds_give() -> None:
    assert crd.stale(CRDS) == []


def test_generating_twice_gives_the_same_bytes() -> None:
    assert crd.files() == crd.files()


def test_check_fails_on_a_difference_and_passes_after_writing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_every_definition_is_small_enough_for_kubectl_apply() -> None:
    assert all(len(text.encode()) < 256 * 1024 for text in crd.files().values())


def test_schemas_hold_nothing_that_a_structural_schema_may_not() -> None:
    for path, part in _all_parts():
        assert not {"$ref", "$defs", "title", "const", "oneOf", "allOf", "prefixItems"} & set(part), path
        assert "nullable" not in part or part.get("x-kubernetes-preserve-unknown-fields"), path
        assert part.get("additionalProperties") is not False, path
        assert isinstance(part.get("exclusiveMinimum", True), bool), path
        assert ("properties" in part) + ("additionalProperties" in part) < 2, path
        if "anyOf" in part:
            assert part["x-kubernetes-int-or-string"] is True, path


def test_every_part_has_a_type_unless_its_content_is_free() -> None:
    for path, part in _all_parts():
        free = part.get("x-kubernetes-preserve-unknown-fields") or part.get("x-kubernetes-int-or-string")
        assert ("type" in part) != bool(free), path


def test_only_arguments_of_an_environment_and_affinity_are_free() -> None:
    free = [path for path, part in _all_parts() if part.get("x-kubernetes-preserve-unknown-fields")]
    assert free == [
        "RLJob.spec.environment.args[]",
        "ModelPool.spec.rollout.affinity[]",
        "ModelPool.spec.trainer.affinity[]",
    ]


@pytest.mark.parametrize(("bound", "sign"), [("minimum", ">"), ("maximum", "<")])
def test_every_fractional_bound_of_a_number_is_a_rule_too(bound: str, sign: str) -> None:
    """The API server converts a bound to the type of the value: `minimum: 0.01` is 0 for an integer."""
    for path, part in _all_parts():
        if part.get("type") == "number" and not float(part.get(bound, 0)).is_integer():
            assert any(
                rule in _rules(part) for rule in (f"self {sign}= {part[bound]}", f"self {sign} {part[bound]}")
            ), path


def _bounded(**bounds: float) -> Schema:
    """Schema of a field with bounds that no field of the kinds has yet."""

    class Bounded(BaseModel):
        value: float = Field(**bounds)  # type: ignore[arg-type]

    whole = Bounded.model_json_schema()
    return structural.structural(whole["properties"]["value"], {})


def test_a_fractional_bound_is_left_out_of_the_schema_where_the_server_would_refuse_an_integer_that_keeps_it() -> None:
    """For the integer 0 the server reads `0.5, exclusive` as `0, exclusive`."""
    part = _bounded(gt=-0.5, lt=0.5)
    assert not {"exclusiveMinimum", "exclusiveMaximum"} & part.keys()
    assert _rules(part) == ["self > -0.5", "self < 0.5"]
    assert (part["minimum"], part["maximum"]) == (-0.5, 0.5)


def test_whole_bounds_need_no_rule() -> None:
    part = _bounded(gt=0, le=10)
    assert (part["minimum"], part["exclusiveMinimum"], part["maximum"]) == (0, True, 10)
    assert _rules(part) == []


def test_everything_is_bounded_so_that_rules_have_a_cost_that_the_api_server_can_know() -> None:
    for path, part in _all_parts():
        if part.get("type") == "string" and ".spec" in path:
            assert "maxLength" in part or "enum" in part, path
        if part.get("type") == "array":
            assert "maxItems" in part, path
        if "additionalProperties" in part:
            assert "maxProperties" in part, path


def test_every_field_is_explained() -> None:
    for path, part in _all_parts():
        if ".metadata" not in path and not path.endswith("[]"):
            assert part.get("description"), path


def test_agents_merge_by_name() -> None:
    agents = _schema(RLJob)["properties"]["spec"]["properties"]["agents"]
    assert agents["x-kubernetes-list-type"] == "map"
    assert agents["x-kubernetes-list-map-keys"] == ["name"]
    assert agents["items"]["required"] == ["name"]


def test_a_job_is_fixed_but_for_steps_priority_suspension_times_and_patience() -> None:
    spec = copy.deepcopy(_schema(RLJob)["properties"]["spec"]["properties"])
    training = spec.pop("training")["properties"]
    assert _rules(training.pop("steps")) == ["self >= oldSelf"]
    fields = {**spec, **training}
    assert {name for name, part in fields.items() if "self == oldSelf" not in _rules(part)} == CHANGEABLE


def test_a_pools_model_is_fixed() -> None:
    spec = _schema(ModelPool)["properties"]["spec"]["properties"]
    assert [name for name, part in spec.items() if any("oldSelf" in rule for rule in _rules(part))] == ["model"]


def test_a_transition_rule_stands_only_where_the_field_is_always_there() -> None:
    """The API server skips a rule with oldSelf when the field appears or disappears."""
    for path, part in _all_parts():
        always = part.get("required", [])
        for name, child in part.get("properties", {}).items():
            if any("oldSelf" in rule for rule in _rules(child)):
                assert "default" in child or name in always, f"{path}.{name}"


def test_exactly_one_source_is_asked_of_models_and_environments() -> None:
    model = _schema(ModelPool)["properties"]["spec"]["properties"]["model"]
    environment = _schema(RLJob)["properties"]["spec"]["properties"]["environment"]
    assert any("exists_one" in rule for rule in _rules(model))
    assert "has(self.name) != has(self.image)" in _rules(environment)


def test_refused_sampling_is_refused_loudly_by_the_api_server_too() -> None:
    rollout = _schema(RLJob)["properties"]["spec"]["properties"]["rollout"]
    for key in ("topP", "topK", "presencePenalty"):
        assert f"!has(self.{key})" in _rules(rollout)
        assert key in rollout["properties"]
    messages = [rule["message"] for rule in rollout["x-kubernetes-validations"]]
    assert any(text.startswith("topP is refused: temperature is the only sampling setting") for text in messages)


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (RLJob, {"poolRef": {"name": "p"}, "environment": {"name": "reverse"}, "training": {"steps": 3}}),
        (
            RLJob,
            {
                "poolRef": {"name": "p"},
                "environment": {"name": "reverse", "args": {"partial": True}},
                "training": {"steps": 3, "optimizer": {"learningRate": 0.1}},
                "agents": [{"name": "a", "adapter": {"rank": 16}}, {"name": "b", "trainable": False}],
            },
        ),
        (ModelPool, {"model": {"builtin": "tiny"}}),
        (ModelPool, {"model": {"hub": {"id": "a/b"}}, "rollout": {"replicas": 2}}),
        (Tenant, {"namespaces": ["a"]}),
    ],
)
def test_the_api_server_fills_in_exactly_what_a_worker_would(kind: type[RLJob], spec: dict[str, Any]) -> None:
    body = {"apiVersion": "marlaas.dev/v1alpha1", "kind": kind.__name__, "metadata": {"name": "x"}, "spec": spec}
    worker = kind.model_validate(body).spec.model_dump(mode="json", by_alias=True)
    server = _with_defaults(spec, _schema(kind)["properties"]["spec"])
    assert _without_empty(server) == _without_empty(worker)


@pytest.mark.parametrize("kind", KINDS)
def test_every_printer_column_shows_a_field_that_there_is(kind: type) -> None:
    for heading, column_type, path, _ in crd.PRESENTATIONS[kind.__name__].columns:
        if path.startswith(".metadata"):
            continue
        part = _schema(kind)
        for name in path.removeprefix(".").replace("[0]", "").split("."):
            part = part.get("items", part)["properties"][name]
        assert part["type"] == column_type, heading


def test_phases_of_the_status_are_those_of_the_progress() -> None:
    status = _schema(RLJob)["properties"]["status"]["properties"]
    assert status["phase"]["enum"] == [phase.value for phase in Phase]


def test_kubectl_knows_short_names_and_one_category() -> None:
    names = {kind: yaml.safe_load(text)["spec"]["names"] for kind, text in crd.files().items()}
    assert names["marlaas.dev_rljobs.yaml"]["shortNames"] == ["rlj"]
    assert names["marlaas.dev_modelpools.yaml"]["shortNames"] == ["mp"]
    assert all(one["categories"] == ["marlaas"] for one in names.values())


def test_status_is_a_subresource_and_jobs_alone_are_namespaced() -> None:
    for kind in KINDS:
        definition = crd.definition(kind)["spec"]
        assert definition["versions"][0]["subresources"] == {"status": {}}
        assert definition["scope"] == ("Namespaced" if kind is RLJob else "Cluster")
