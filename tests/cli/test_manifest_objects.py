"""Files, objects, what objects say of each other, and of models and adapters that lie on this machine; nothing is loaded."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from tests.models.model_folders import write_adapter, write_model
from tests.tables import data, rows

from marlaas.envs import BUILTINS
from marlaas.manifest import InvalidManifest, load, models
from marlaas.models import prepare
from marlaas.models.memory import Machine
from marlaas_api.documents import job_document
from marlaas_api.messages import TenantQuota

TENANT = "spec: {namespaces: [team-a]}"


def _more_jobs(*names: str):
    text = "training: {steps: 3}"
    for name in names:
        job = f"apiVersion: marlaas.dev/v1alpha1\nkind: RLJob\nmetadata: {{name: {name}, namespace: team-a}}\nspec:\n"
        text += f"\n---\n{job}  poolRef: {{name: tiny}}\n  environment: {{name: reverse}}\n  training: {{steps: 4}}"
    return text


@pytest.mark.parametrize(("edit", "line"), rows(__file__, "objects"))
def test_what_does_not_go_together_is_told_with_line_and_numbers(complaints, edit, line):
    assert complaints(edit) == [
        f"job.yaml:{line.replace('{here}', str(Path.cwd())).replace('{builtins}', ', '.join(BUILTINS))}"
    ]


def test_a_right_manifest_is_loaded_in_the_order_of_the_files(manifest):
    loaded = load([manifest(_more_jobs("products"))])
    assert [pool.metadata.name for pool in loaded.pools] == ["tiny"]
    assert [tenant.metadata.name for tenant in loaded.tenants] == ["red"]
    assert [job.metadata.name for job in loaded.jobs] == ["sums", "products"]
    assert loaded.folders == (Path.cwd().resolve(),) * 2
    assert loaded.notes == ()


def test_a_cluster_may_have_the_pool_that_the_files_lack(manifest, tmp_path):
    job = manifest().read_text(encoding="utf-8").split("---\n")[2]
    (tmp_path / "job.yaml").write_text(job, encoding="utf-8")
    loaded = load(["job.yaml"], runnable=False)
    assert [str(note) for note in loaded.notes] == [
        "job.yaml:5: spec.poolRef.name: ModelPool 'tiny' is not in these files; the job is not checked against it"
    ]


@pytest.mark.parametrize(("model", "edits", "runs", "said"), rows(__file__, "findings"))
def test_what_a_model_or_pool_cannot_do_is_told_here_or_wherever_it_is_to_run(
    complaints, tmp_path, model, edits, runs, said
):
    """model: what is unusual about the one in `m`. runs: whether the manifest is to run on this machine."""
    write_model(tmp_path / "m", **model)
    for runnable in runs:
        found = complaints(*edits, runnable=runnable)
        assert [words in line for words, line in zip(said, found, strict=True)] == [True] * len(said), found


def test_a_pool_of_one_agent_alone_is_used_and_is_in_the_jobs_document(manifest):
    loaded = load([manifest(*data(__file__, "team"))])
    assert [str(note) for note in loaded.notes] == [], "the pool is used"
    assert job_document(loaded.jobs[0], (), "u1", None).pools == {"tiny", "big"}


def test_a_module_beside_the_manifest_is_noted_to_whoever_submits_it(manifest, tmp_path):
    (tmp_path / "games.py").write_text("def guess(task, agent):\n    return 0.0\n", encoding="utf-8")
    path = manifest("environment: {name: 'games:guess'}")
    (note,) = load([path], runnable=False).cluster_notes
    assert str(note).startswith(
        "job.yaml:19: spec.environment.name: a cluster's sandboxes look for 'games:guess' in the worker image"
    )
    assert load([path]).notes == ()


def test_a_tenants_weight_and_quota_are_in_its_jobs_documents(manifest):
    quota = "{jobs: 1, adapterSlots: 2, tokensPerSecond: 3.5, trainerSecondsPerHour: 60, storage: 4Gi}"
    loaded = load([manifest((TENANT, f"spec: {{namespaces: [team-a], weight: 2, quota: {quota}}}"))])
    assert list(loaded.notes) == []
    document = job_document(loaded.jobs[0], loaded.tenants, "uid", None)
    assert document.tenant_weight == 2.0
    assert document.tenant_quota == TenantQuota(
        jobs=1, adapter_slots=2, tokens_per_second=3.5, trainer_seconds_per_hour=60.0, storage="4Gi"
    )
    assert job_document(loaded.jobs[0], (), "uid", None).tenant_quota == TenantQuota()


def test_lists_as_kubectl_prints_them_are_taken_apart_with_their_lines(manifest):
    items = list(yaml.safe_load_all(manifest().read_text(encoding="utf-8")))
    items[2]["spec"]["training"]["stepz"] = 4
    items[0]["status"] = {"anything": True}
    text = yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": items}, sort_keys=False)
    Path("list.yaml").write_text(text, encoding="utf-8")
    line = text.splitlines().index("      stepz: 4") + 1
    with pytest.raises(InvalidManifest) as caught:
        load(["list.yaml"])
    assert str(caught.value) == f"list.yaml:{line}: spec.training.stepz: unknown field; did you mean 'steps'?"


def test_a_manifest_without_a_job_is_nothing_to_run(manifest):
    path = manifest()
    path.write_text(path.read_text(encoding="utf-8").split("---\n")[0], encoding="utf-8")
    with pytest.raises(InvalidManifest, match=r"^no RLJob in job.yaml: nothing can be run$"):
        load([path])
    assert len(load([path], runnable=False).pools) == 1


def test_an_object_that_is_given_twice_word_for_word_is_refused_too(manifest, tmp_path):
    job = manifest().read_text(encoding="utf-8").split("---\n")[2]
    (tmp_path / "copy.yaml").write_text(job, encoding="utf-8")
    with pytest.raises(InvalidManifest, match=r"RLJob 'team-a/sums' is already defined at job.yaml:14"):
        load(["job.yaml", "copy.yaml"])


@pytest.mark.parametrize(("edits", "notes"), rows(__file__, "notes"))
def test_what_is_right_and_may_surprise_is_noted(manifest, edits, notes):
    assert [str(note) for note in load([manifest(*edits)]).notes] == [f"job.yaml:{note}" for note in notes]


PATH = "model: {path: m}"
GIB = 2**30
HUGE = {"model.layers.0.mlp.up_proj.weight": (2**20, 2**20)}
TARGETS = "agents: [{name: policy, adapter: {targets: [qproj]}}]"
INIT_FROM = "job.yaml:22: spec.agents[0].initFrom.path:"


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    monkeypatch.setattr(models, "machine", lambda: Machine(16 * GIB, 16 * GIB))
    monkeypatch.setattr(models, "has_gpu", lambda: False)


def test_a_model_too_big_for_this_machine_is_refused_with_the_numbers(complaints, tmp_path, monkeypatch):
    write_model(tmp_path / "m", HUGE)
    (line,) = complaints(PATH)
    assert line.startswith(
        "job.yaml:5: spec.model: about 8201.2 GiB of memory are needed, and 16.0 GiB are available (in GiB, engine: "
    )
    monkeypatch.setattr(models, "has_gpu", lambda: True)
    assert complaints(PATH) == [], "a GPU has memory of its own"


def test_a_hub_model_is_looked_into_if_it_is_in_the_cache(complaints, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    hub = "model: {hub: {id: some/model}}"
    assert complaints(hub, TARGETS) == []
    repository = tmp_path / "hub" / "models--some--model"
    write_model(repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (line,) = complaints(hub, TARGETS)
    assert line.endswith("did you mean 'q_proj'?")


def test_packages_that_the_workers_lack_are_named_before_anything_is_started(complaints, monkeypatch):
    monkeypatch.setattr(models, "find_spec", lambda name: None if name in ("vllm", "peft") else name)
    how = "install MARLaaS with its extra cpu or gpu: pip install 'marlaas[cpu]'"
    assert complaints() == [
        f"job.yaml:4: spec: its workers need peft, which this machine lacks; {how}",
        f"job.yaml:4: spec.rollout.engine: the Python package vllm is not installed; {how} (the engine `reference` does not need it, and is slow)",
    ]
    assert complaints(runnable=False) == []


@pytest.mark.parametrize(("files", "pool", "job", "findings"), rows(__file__, "templates"))
def test_the_chat_template_in_effect_is_checked(complaints, manifest, tmp_path, files, pool, job, findings):
    config = {"eos_token": "</s>", "added_tokens_decoder": {"5": {"content": "<|call|>", "special": True}}}
    for name, text in {"tokenizer_config.json": json.dumps(config), **files}.items():
        (write_model(tmp_path / "m") / name).write_text(text)
    edits = f"{PATH}\n  chatTemplate: {{{pool}}}", job
    found = complaints(*edits, runnable=False)
    found = found or [one for one in notes_of(manifest, *edits) if "template" in one.lower() and "end token" not in one]
    assert [words in one for words, one in zip(findings, found, strict=True)] == [True] * len(findings), found


def notes_of(manifest, *edits: str, runnable=False):
    return [str(note) for note in load([manifest(*edits)], runnable=runnable).notes]


@pytest.mark.parametrize(("model", "edit", "said"), rows(__file__, "model_notes"))
def test_what_surprises_of_a_model_and_what_would_keep_a_local_run_from_it_is_noted(
    manifest, tmp_path, model, edit, said
):
    write_model(tmp_path / "m", **model)
    found = notes_of(manifest, edit)
    assert [words in note for words, note in zip(said, found, strict=True)] == [True] * len(said), found


def beginning(path):
    return f"agents: [{{name: policy, adapter: {{rank: 8, alpha: 16}}, initFrom: {{path: '{path}'}}}}]"


@pytest.mark.parametrize(("edit", "said"), rows(__file__, "folders"))
def test_a_folder_that_cannot_be_used_is_told(complaints, tmp_path, edit, said):
    write_adapter(tmp_path / "half", "{}")
    (tmp_path / "half" / "adapter_model.safetensors").unlink()
    (tmp_path / "file").touch()
    (line,) = complaints(edit)
    assert line.endswith(said.replace("{here}", str(tmp_path)))


@pytest.mark.parametrize(("config", "said"), rows(__file__, "adapters"))
def test_an_adapter_of_another_size_is_told_with_both_numbers(complaints, tmp_path, config, said):
    write_adapter(tmp_path / "a", config)
    for line, words in zip(complaints(beginning("a")), said, strict=True):
        assert line.startswith(f"{INIT_FROM} the adapter in {tmp_path / 'a'} {words}")


@pytest.mark.parametrize(("pool", "said"), rows(__file__, "caches"))
def test_a_kv_cache_too_small_for_a_group_is_noted_with_the_value_to_set(manifest, tmp_path, pool, said):
    """A token's keys and values take 128 KiB in bfloat16, as of Llama-3.1-8B, which has more layers with fewer heads."""
    heads = {"num_attention_heads": 128, "num_key_value_heads": 128, "head_dim": 128}
    write_model(tmp_path / "m", num_hidden_layers=2, max_position_embeddings=131072, **heads)
    loaded = load([manifest(f"model: {{path: m}}\n  rollout: {pool}")], runnable=False)
    assert [str(note).partition("kvCacheBytes: ")[2] for note in loaded.notes if "kvCacheBytes" in str(note)] == said[
        1:
    ]
    assert list(loaded.cache_rooms.values()) == said[:1]


@pytest.mark.parametrize("runnable", [True, False])
def test_an_adapter_of_another_base_model_is_noted(manifest, tmp_path, runnable):
    write_model(tmp_path / "m")
    for base, notes in (("/elsewhere/m", 0), ("org/other", 1)):
        config = {"r": 8, "lora_alpha": 16, "base_model_name_or_path": base}
        write_adapter(tmp_path / f"adapter-{notes}", json.dumps(config))
        found = notes_of(manifest, PATH, beginning(f"adapter-{notes}"), runnable=runnable)
        assert (
            sum("the adapter was trained on org/other, and the pool's base model is m" in one for one in found) == notes
        )


EXAMPLES = Path(__file__).parents[2] / "examples" / "distill"


@pytest.mark.parametrize("runnable", [True, False])
def test_a_student_needs_a_teacher_of_its_own_vocabulary(tmp_path, runnable):
    """The example of a student is right once its teacher has an adapter."""
    folder = tmp_path / "examples" / "distill"
    shutil.copytree(EXAMPLES, folder)
    write_adapter(tmp_path / "runs" / "distill-teacher", json.dumps({"r": 8, "lora_alpha": 16}))
    teacher, student = folder / "teacher.yaml", folder / "student.yaml"
    assert load([teacher], runnable=True).notes == load([student], runnable=runnable).notes == ()
    other = tmp_path / "other"
    shutil.copytree(prepare("tiny"), other)
    tokenizer = json.loads((other / "tokenizer.json").read_text("utf-8"))
    tokenizer["model"]["vocab"] |= {"a": tokenizer["model"]["vocab"]["b"], "b": tokenizer["model"]["vocab"]["a"]}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    pool, model = "name: teachers", "model: {builtin: tiny}"
    before, _, after = student.read_text("utf-8").partition(pool)
    student.write_text(before + pool + after.replace(model, f"model: {{path: {other}}}", 1), "utf-8")
    with pytest.raises(InvalidManifest) as caught:
        load([student], runnable=runnable)
    assert "spec.training.distillation.teacher: the models of ModelPool 'teachers' of agent 'teacher' and" in str(
        caught.value
    )
    assert "ModelPool 'tiny' have different vocabularies, of 103 and 103 tokens" in str(caught.value)


def test_an_export_replaces_an_adapter_only(complaints, tmp_path):
    (tmp_path / "mine").mkdir()
    assert complaints("export: {path: mine}") == []
    (tmp_path / "mine" / "thesis.tex").touch()
    said = f"{tmp_path / 'mine'} holds files other than an adapter; choose a new folder"
    assert complaints("export: {path: mine}") == [f"job.yaml:22: spec.export.path: {said}"]
    assert complaints("export: {path: mine}", runnable=False) == []
    (tmp_path / "mine" / "adapter_config.json").touch()
    assert complaints("export: {path: mine}") == [f"job.yaml:22: spec.export.path: {said}"], "nothing else is lost"
    (tmp_path / "mine" / "thesis.tex").unlink()
    assert complaints("export: {path: mine}") == [], "an adapter is replaced"


def test_two_jobs_of_a_cluster_do_not_export_to_one_place(complaints):
    export = "export: {s3: {url: s3://a/b, secretRef: {name: c}}, volume: {claimName: a, path: b}}"
    other = f"{export}\n---\napiVersion: marlaas.dev/v1alpha1\nkind: RLJob\nmetadata: {{name: b, namespace: team-a}}\nspec:\n  "
    spec = f"poolRef: {{name: tiny}}\n  environment: {{name: reverse}}\n  training: {{steps: 2}}\n  {export}"
    found = complaints(other + spec, runnable=False)
    assert [line.partition(" is also written")[0].rpartition(": ")[2] for line in found] == ["s3://a/b", "team-a/a/b"]


def test_a_kl_reference_is_looked_into_like_an_adapter_to_begin_from(complaints, tmp_path):
    write_adapter(tmp_path / "a", json.dumps({"r": 4, "lora_alpha": 16}))
    for path, said in (("a", "has rank 4, and adapter.rank of the agent is 8"), ("b", "the folder does not exist")):
        (line,) = complaints(f"training: {{steps: 3, kl: {{reference: {{path: {path}}}}}}}")
        assert "spec.training.kl.reference.path: " in line
        assert said in line
