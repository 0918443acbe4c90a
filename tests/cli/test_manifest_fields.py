"""Bad fields and exactly what is said of them."""

import re

import pytest
from tests.tables import rows

from marlaas.local.documents import CHANGEABLE
from marlaas.manifest import InvalidManifest, load
from marlaas.manifest.findings import Placed
from marlaas.manifest.objects import File, Objects, read_objects
from marlaas.manifest.references import check_environments
from marlaas_api.kinds import RLJob, RLJobSpec, Spec
from marlaas_api.kinds.base import NO_CHANGE
from marlaas_api.reason_texts import TEXTS
from marlaas_api.reasons import Reason

RIGHT_DATA = ["{}", "{tasks: 5}", "{tasks: 5, order: shuffled}", "{tasks: 5, skip: {}}", "{tasks: 1, skip: {maxShare: 0.9}}"]  # fmt: skip


@pytest.mark.parametrize(("edit", "line"), rows(__file__, "fields"))
def test_a_bad_field_is_named_with_its_line_and_what_was_expected(complaints, edit, line):
    assert complaints(edit) == [f"job.yaml:{line}"]


@pytest.mark.parametrize("key", ["topP", "topK", "minP", "presencePenalty", "frequencyPenalty", "repetitionPenalty"])
def test_sampling_that_the_trainer_cannot_reproduce_is_refused_with_the_reason(complaints, key):
    assert complaints(f"rollout: {{{key}: 0.5}}") == [
        f"job.yaml:20: spec.rollout.{key}: refused: temperature is the only sampling setting that the trainer can "
        f"reproduce; {key} makes the engine sample from another distribution than the one whose logprobs are trained on. "
        "Remove it"
    ]


def test_every_error_is_told_at_once_in_the_order_of_the_lines(complaints):
    lines = complaints("training: {steps: 0, algorithm: ppo}", "rollout: 5", "maxRank: 17")
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
    assert [str(finding) for finding in check_environments(jobs, timeout_s=1)] == [
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
        if NO_CHANGE[1] in str(field.json_schema_extra):
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
