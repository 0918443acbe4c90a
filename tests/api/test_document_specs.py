"""The specs in documents: separate from the kinds, tolerant of newer releases, and complete."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import ormsgpack
import pytest
import yaml
from pydantic import BaseModel
from tests.tables import rows

from marlaas_api.documents import job_spec, pool_spec
from marlaas_api.kinds import KINDS, ModelPoolSpec, RLJobSpec
from marlaas_api.messages import JobDocument, JobSpec, PoolDocument, PoolSpec
from marlaas_api.messages.base import SpecPart
from marlaas_api.messages.packed import PackedArgs
from marlaas_api.wire import BadMessage, decode_as, encode

FOLDERS = Path(__file__).parents[2] / "examples", Path(__file__).parent / "fixtures"
MANIFESTS = sorted(path for folder in FOLDERS for path in folder.rglob("*.yaml"))
"""The fixtures have manifests that set every field."""

IDENTITY = {"namespace": "team-a", "job": "sums", "uid": "u", "pool": "tiny", "tenant": "team-a"}
GIVEN = yaml.safe_load(Path(__file__).with_name("document_specs.yaml").read_text())
LEFT_OUT = {field for fields in GIVEN["left_out"].values() for field in fields}


def document() -> JobDocument:
    return JobDocument(**IDENTITY, spec=job_spec(RLJobSpec.model_validate(GIVEN["job"])))


def pool_document() -> PoolDocument:
    return PoolDocument(name="tiny", model_path="/m", spec=pool_spec(ModelPoolSpec.model_validate(GIVEN["pool"])))


def of_a_newer_release(value: Any) -> Any:
    """Add an unknown field to every mapping, also inside lists; `args` has the environment's own keys."""
    if isinstance(value, dict):
        grown = {key: item if key == "args" else of_a_newer_release(item) for key, item in value.items()}
        return {**grown, "sinceTomorrow": {"a": [1]}}
    return [of_a_newer_release(item) for item in value] if isinstance(value, list) else value


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models(inner)


def pairs(kind: type[BaseModel], ours: type[BaseModel]) -> Iterator[tuple[type[BaseModel], type[BaseModel]]]:
    """Yield each part of a kind's spec with the same part of the document's."""
    yield kind, ours
    for name, field in ours.model_fields.items():
        theirs = kind.model_fields.get(name)
        for one, other in zip(models(theirs.annotation if theirs else None), models(field.annotation), strict=False):
            yield from pairs(one, other)


PARTS = [*pairs(RLJobSpec, JobSpec), *pairs(ModelPoolSpec, PoolSpec)]


@pytest.mark.parametrize("message", [document(), pool_document()], ids=["job", "pool"])
def test_a_document_of_a_newer_release_is_read_without_the_fields_that_are_new(message):
    opened = ormsgpack.unpackb(encode(message))
    newer = ormsgpack.packb({**opened, "d": of_a_newer_release(opened["d"])})
    assert newer.count(b"sinceTomorrow") >= 5
    assert decode_as(type(message), newer) == message


def test_every_field_and_choice_of_a_kind_is_carried_or_listed_as_not_needed_and_no_other():
    """A conversion by name leaves a field that the kind lacks at its default, and fails at a choice that only the kind has."""
    lacking = [(kind, kind.model_fields.keys() - ours.model_fields.keys()) for kind, ours in PARTS]
    left_out = {f"{kind.__name__}.{name}" for kind, names in lacking for name in names}
    assert left_out == LEFT_OUT
    assert len({ours for _, ours in PARTS}) > 25
    for kind, ours in PARTS:
        assert issubclass(ours, SpecPart)
        assert set(ours.model_fields) <= set(kind.model_fields), ours
        for name, field in ours.model_fields.items():
            if choices(field.annotation):
                assert choices(field.annotation) == choices(kind.model_fields[name].annotation), (ours, name)


def choices(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(choice for inner in get_args(annotation) for choice in choices(inner))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_workers_see_the_values_of_the_manifest(path):
    kinds = {kind.__name__: kind for kind in KINDS}
    for body in yaml.safe_load_all(path.read_text()):
        given = kinds[body["kind"]].model_validate(body)
        if body["kind"] == "RLJob":
            read = decode_as(JobDocument, encode(JobDocument(**IDENTITY, spec=job_spec(given.spec))))
            assert_same(given.spec, read.spec)
        elif body["kind"] == "ModelPool":
            sent = PoolDocument(name="tiny", model_path="", spec=pool_spec(given.spec))
            assert_same(given.spec, decode_as(PoolDocument, encode(sent)).spec)


def assert_same(given: Any, read: Any) -> None:
    if isinstance(read, SpecPart):
        for name in type(read).model_fields:
            if name in ("adapter", "trainable") and getattr(given, "policy", None) is not None:
                continue  # the document has what follows from the policy, which another agent names
            assert_same(getattr(given, name), getattr(read, name))
    elif isinstance(read, tuple):
        assert len(given) == len(read)
        for one, other in zip(given, read, strict=True):
            assert_same(one, other)
    else:
        assert given == read


def test_a_field_that_a_document_lacks_has_the_default_of_the_first_release():
    """Writers leave out defaults: if one changes, this test must not follow. `SpecPart` explains it."""
    required = {"pool_ref": {"name": "tiny"}, "environment": {"name": "reverse"}, "training": {"steps": 3}}
    defaults = yaml.safe_load(Path(__file__).with_name("document_defaults.yaml").read_text())
    assert JobSpec.model_validate(required).model_dump(mode="json") == defaults["job"]
    assert PoolSpec.model_validate({"model": {"builtin": "tiny"}}).model_dump(mode="json") == defaults["pool"]


@pytest.mark.parametrize(("change", "words"), rows(__file__, "unusable"))
def test_a_value_that_no_worker_could_use_is_refused_with_its_field(change, words):
    opened = ormsgpack.unpackb(encode(document()))
    opened["d"]["spec"] |= change
    with pytest.raises(BadMessage, match=words):
        decode_as(JobDocument, ormsgpack.packb(opened))
    opened = ormsgpack.unpackb(encode(pool_document()))
    opened["d"]["spec"]["model"] = {"oci": "registry/model"}
    with pytest.raises(BadMessage, match="a newer release may have other sources: upgrade"):
        decode_as(PoolDocument, ormsgpack.packb(opened))


def test_equal_arguments_share_one_text_as_long_as_any_of_them_is_kept():
    """The operator keeps each job's object and its document, and either may be replaced first."""
    first, second = (PackedArgs({"text": "".join(map(str, range(2000)))}) for _ in range(2))
    assert first._text is second._text
    del first
    assert PackedArgs(second.value)._text is second._text
