"""YAML as Kubernetes reads it, with lines; files that are no manifests, or are read in another way; bad fields."""

import copy
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tables import data, rows

from marlaas.local.documents import CHANGEABLE
from marlaas.manifest import InvalidManifest, load
from marlaas.manifest.documents import YamlError, read_documents
from marlaas.manifest.findings import Placed
from marlaas.manifest.objects import File, Objects, piped, read_objects, without_pipes
from marlaas.manifest.references import check_environments
from marlaas_api.kinds import RLJob, RLJobSpec, Spec
from marlaas_api.kinds.base import NO_CHANGE, unchanged
from marlaas_api.reason_texts import TEXTS
from marlaas_api.reasons import Reason


@pytest.mark.parametrize(("text", "value"), rows(__file__, "scalars"))
def test_a_scalar_is_read_as_kubernetes_reads_it(text, value):
    (document,) = read_documents(f"- {text}\n")
    assert document.value == [value]
    assert type(document.value[0]) is type(value)


def test_values_have_their_lines_or_their_holders_also_in_further_documents():
    (document,) = read_documents("a: 1\nb:\n  - x\n  - {c: 2,\n     d: 3}\n")
    places = {("a",): 1, ("b",): 2, ("b", 0): 3, ("b", 1): 4, ("b", 1, "d"): 5, ("b", 1, "missing", 3, "deep"): 4}
    assert {place: document.line(place) for place in places} == places
    documents = list(read_documents("---\n---\na: 1\n---\n# nothing\n---\nb: 2\n"))
    assert [(document.value, document.line(())) for document in documents] == [({"a": 1}, 3), ({"b": 2}, 7)]


def test_anchors_and_merges_work_and_a_bomb_of_aliases_does_not_go_off():
    (document,) = read_documents("base: &base {x: 1, y: 2}\nall:\n  <<: *base\n  x: 3\nboth:\n  <<: [{x: 4}, *base]\n")
    assert document.value["all"] == {"x": 3, "y": 2}
    assert document.value["both"] == {"x": 4, "y": 2}
    levels = [f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * 9)}]" for level in range(1, 9)]
    with pytest.raises(YamlError, match="more than 100000 values"):
        list(read_documents("\n".join(["l0: &l0 [x]", *levels])))


@pytest.mark.parametrize(("text", "line", "said"), rows(__file__, "no_yaml"), ids=lambda value: ascii(value)[:14])
def test_what_is_no_yaml_is_told_with_its_line(text, line, said):
    with pytest.raises(YamlError) as caught:
        list(read_documents(text))
    assert (caught.value.line, str(caught.value)) == (line, said)


@pytest.mark.parametrize(("text", "times", "line"), rows(__file__, "no_manifests"))
def test_a_file_that_is_no_manifest_is_told_from_the_others(manifest, tmp_path, text, times, line):
    (tmp_path / "bad.yaml").write_bytes(text.encode("latin-1") * times)
    with pytest.raises(InvalidManifest) as caught:
        load([manifest(), "bad.yaml"])
    assert str(caught.value) == line


def test_a_byte_order_mark_is_no_part_of_the_text(manifest):
    path = manifest()
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(load([path]).jobs) == 1


POOL = data(__file__, "pool")


@pytest.mark.parametrize("indent", [None, 1, "\t"])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_json_means_what_it_means_to_kubectl(indent, ascii_only):
    text = json.dumps(POOL, indent=indent, ensure_ascii=ascii_only)
    (document,) = read_documents(text)
    assert document.value == POOL


def test_a_pipe_and_standard_input_are_files_read_once_and_count_every_time(manifest, monkeypatch):
    text = yaml.safe_dump(POOL).encode()
    for content in (manifest("training: {stepz: 3}").read_bytes(), text):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        if content != text:
            with pytest.raises(InvalidManifest, match=r"<stdin>:21: spec.training.stepz: unknown field"):
                load(["-"])
    reading, writing = os.pipe()
    os.write(writing, text)
    os.close(writing)
    pipe = f"/dev/fd/{reading}"
    try:
        for file in ("-", pipe):
            for _ in range(2):
                assert [pool.metadata.name for pool in load([file], runnable=False).pools] == ["tiny"]
        assert without_pipes(["a.yaml", pipe, "-"]) == ("a.yaml", "-"), "the command that continues a run"
        assert [one["kind"] for one in yaml.safe_load_all(piped(["a.yaml", pipe, "-"]))] == ["ModelPool"] * 2
        assert not piped(["a.yaml"])
    finally:
        os.close(reading)


def test_an_unrendered_template_is_said_to_be_one(tmp_path):
    path = tmp_path / "pool.yaml"
    path.write_text("apiVersion: marlaas.dev/v1alpha1\nkind: ModelPool\nmetadata: {{ .Values.metadata }}\n")
    with pytest.raises(InvalidManifest, match=r"\{\{ .Values.metadata \}\} is a placeholder of a template: render"):
        load([str(path)], runnable=False)


EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
OBJECTS = [document.value for document in read_documents(EXAMPLE.read_text(encoding="utf-8"))]
LINE = re.compile(r"^fuzz\.yaml:[1-9][0-9]*: \S")

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(["", "~", "1e9", "tiny"])
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
)


def _places(value, at=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, item in items for place in _places(item, (*at, key)))]


def _replaced(value, place, new):
    if not place:
        return new
    changed = copy.copy(value)
    changed[place[0]] = _replaced(value[place[0]], place[1:], new)
    return changed


def _added(value, key, new):
    return {**value, key: new} if isinstance(value, dict) else [*value, new] if isinstance(value, list) else new


@st.composite
def bodies(draw):
    body = draw(st.sampled_from(OBJECTS))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(_places(body)))
        new = draw(values)
        if draw(st.booleans()):
            inner: Any = body
            for key in place:
                inner = inner[key]
            new = _added(inner, draw(st.text(max_size=6)), new)
        body = _replaced(body, place, new)
    return body


def _findings(text):
    objects = Objects()
    read_objects(File("fuzz.yaml", Path("/"), text), objects)
    return [str(finding) for finding in objects.errors]


@settings(max_examples=60, deadline=None)
@given(bodies())
def test_a_mutated_object_is_taken_or_told_with_a_line(body):
    for line in _findings(yaml.safe_dump(body, allow_unicode=True)):
        assert LINE.match(line) or line == "fuzz.yaml: contains no objects", line
        assert "pydantic" not in line
        assert "Input should" not in line


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.sampled_from(list("ab:- \n\t{}[]&*!<>'\"#?|%@\\1.~")), max_size=40))
def test_any_text_is_taken_or_told(text):
    for line in _findings(text):
        assert LINE.match(line) or line == "fuzz.yaml: contains no objects", line


RIGHT_DATA = ["{}", "{tasks: 5}", "{tasks: 5, order: shuffled}", "{tasks: 5, skip: {}}", "{tasks: 1, skip: {maxShare: 0.9}}"]  # fmt: skip


@pytest.mark.parametrize(("edit", "line"), rows(__file__, "fields"))
def test_a_bad_field_is_named_with_its_line_and_what_was_expected(complaints, edit, line):
    assert complaints(edit) == [f"job.yaml:{line}"]


def test_every_error_is_told_at_once_in_the_order_of_the_lines(complaints):
    lines = complaints("training: {steps: -1, algorithm: ppo}", "rollout: 5", "maxRank: 17")
    assert [line.split(":")[1] for line in lines] == ["6", "20", "21", "21"]


RIGHT = ["training: {steps: 3}", "evaluation:\n  activeDeadlineSeconds: null"]


@pytest.mark.parametrize("edit", [*RIGHT, *(f"training: {{steps: 3, data: {text}}}" for text in RIGHT_DATA)])
def test_a_right_field_is_taken_and_null_means_absent_as_in_kubernetes(complaints, edit):
    assert complaints(edit) == []


OWN = "environment: {name: 'games:guess', args: {limit: 3}}"
GOOD = "def guess(task, agent, limit: int = 5):\n    return 0.0\n"


@pytest.mark.parametrize(("source", "said"), rows(__file__, "modules"))
def test_a_users_module_is_found_beside_the_manifest_and_cannot_hurt_the_command(complaints, tmp_path, source, said):
    (tmp_path / "games.py").write_text(source, encoding="utf-8")
    assert complaints(OWN) == ([f"job.yaml:19: spec.environment: environment 'games:guess'{said}"] if said else [])


def test_a_module_that_never_ends_its_import_is_given_up(tmp_path, manifest):
    (tmp_path / "games.py").write_text("while True:\n    pass\n", encoding="utf-8")
    objects = Objects()
    read_objects(File("job.yaml", tmp_path, manifest(OWN).read_text(encoding="utf-8")), objects)
    jobs = [Placed(here.object, here.source) for here in objects.placed if isinstance(here.object, RLJob)]
    assert [str(finding) for finding in check_environments(jobs, timeout_s=1)[0]] == [
        "job.yaml:19: spec.environment: environment 'games:guess': importing its module took longer than 1 s"
    ]


def test_every_job_finds_the_module_beside_its_own_manifest(tmp_path, manifest):
    text = manifest(OWN).read_text(encoding="utf-8")
    pool, _, job = text.split("---\n")
    for folder, source in (("good", GOOD), ("bad", "1 / 0\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "games.py").write_text(source, encoding="utf-8")
        (tmp_path / folder / "job.yaml").write_text(job.replace("sums", folder), encoding="utf-8")
    (tmp_path / "pool.yaml").write_text(pool, encoding="utf-8")
    assert load(["pool.yaml", "good/job.yaml"]).folders == (tmp_path / "good",)
    with pytest.raises(InvalidManifest) as caught:
        load(["pool.yaml", "good/job.yaml", "bad/job.yaml"])
    assert str(caught.value) == (
        "bad/job.yaml:6: spec.environment: environment 'games:guess': importing games failed: ZeroDivisionError: division by zero"
    )


PARTS_OF_A_POOL = {"rollout.memory", "trainer.memory", "model"}


def changeable(part, prefix=""):
    """Fields without the rule that they cannot change, which do not lie in one with it either."""
    for field in part.model_fields.values():
        is_fixed_in_part = unchanged(str(field.alias)) in str(part.model_config.get("json_schema_extra"))
        if is_fixed_in_part or NO_CHANGE[1] in str(field.json_schema_extra):
            continue
        path, kind = f"{prefix}{field.alias}", field.annotation
        if isinstance(kind, type) and issubclass(kind, Spec):
            yield from changeable(kind, f"{path}.")
        else:
            yield path


def test_the_fields_that_may_change_are_those_that_the_kinds_do_not_fix():
    assert set(changeable(RLJobSpec)) == CHANGEABLE


@pytest.mark.parametrize("reason", Reason)
def test_no_advice_is_to_change_what_cannot_change(reason):
    advice = TEXTS[reason].advice
    named = {path.rstrip(".") for path in re.findall(r"spec\.([A-Za-z.]+)", advice)} - PARTS_OF_A_POOL
    if "a job's own" in advice or any(path not in CHANGEABLE for path in named):
        assert re.search(r"\banew\b|\bnew (?:job|one)\b|create a pool", advice), advice
