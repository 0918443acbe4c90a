"""What is said of a pool's model and of adapters whose folders lie on this machine; nothing is loaded."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.models.model_folders import write_model

from marlaas.manifest import load, models
from marlaas.models.memory import Machine

Complaints = Callable[..., list[str]]
Write = Callable[..., Path]
PATH = "model: {path: m}"
GIB = 2**30
HUGE = {"model.layers.0.mlp.up_proj.weight": (2**20, 2**20)}
INIT_FROM = "job.yaml:22: spec.agents[0].initFrom.path:"


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "machine", lambda: Machine(16 * GIB, 16 * GIB))
    monkeypatch.setattr(models, "has_gpu", lambda: False)


def targets(*names: str) -> str:
    return f"agents: [{{name: policy, adapter: {{targets: [{', '.join(names)}]}}}}]"


@pytest.mark.parametrize("runnable", [True, False])
def test_a_layer_that_the_model_lacks_is_answered_with_the_nearest(
    complaints: Complaints, tmp_path: Path, runnable: bool
) -> None:
    write_model(tmp_path / "m")
    assert complaints(PATH, targets("q_proj", "down_proj"), runnable=runnable) == []
    assert complaints(PATH, targets("down_proj", "qproj"), runnable=runnable) == [
        "job.yaml:22: spec.agents[0].adapter.targets[1]: the model has no linear layer 'qproj'; it has down_proj and q_proj; "
        "did you mean 'q_proj'?"
    ]
    (line,) = complaints(targets("qproj"), runnable=runnable)
    assert line.endswith("found 'qproj'; did you mean 'q_proj'?"), "of a builtin model it is told once"


def test_a_model_that_cannot_be_trained_is_refused_but_one_of_another_machine_is_not_judged(
    complaints: Complaints, tmp_path: Path
) -> None:
    write_model(tmp_path / "m", architectures=["GPT2LMHeadModel"])
    (line,) = complaints(PATH)
    assert line.startswith(
        "job.yaml:5: spec.model.path: the model's architecture is 'GPT2LMHeadModel', and vLLM serves LoRA"
    )
    assert complaints("model: {path: m}\n  rollout: {engine: reference}") == [], "it takes any"
    write_model(tmp_path / "m", {"model.norm.weight": (8,)})
    assert complaints(PATH) == [
        "job.yaml:5: spec.model.path: the model has no linear layers for an adapter; choose another model"
    ]
    for path in ("/nowhere/model", "."):
        assert complaints(f"model: {{path: {path}}}", targets("anything"), runnable=False) == []


def test_a_model_too_big_for_this_machine_is_refused_with_the_numbers(
    complaints: Complaints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "m", HUGE)
    (line,) = complaints(PATH)
    assert line.startswith(
        "job.yaml:5: spec.model: about 8201.2 GiB of memory are needed, and 16.0 GiB are available (in GiB, engine: "
    )
    assert complaints(PATH, runnable=False) == [], "another machine may run it"
    monkeypatch.setattr(models, "has_gpu", lambda: True)
    assert complaints(PATH) == [], "a GPU has memory of its own"


def test_a_hub_model_in_the_cache_is_looked_into_and_one_that_is_not_is_left_to_the_workers(
    complaints: Complaints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    hub = "model: {hub: {id: some/model}}"
    assert complaints(hub, targets("qproj")) == []
    repository = tmp_path / "hub" / "models--some--model"
    write_model(repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (line,) = complaints(hub, targets("qproj"))
    assert line.endswith("did you mean 'q_proj'?")


def test_packages_that_the_workers_lack_are_named_before_anything_is_started(
    complaints: Complaints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "find_spec", lambda name: None if name in ("vllm", "peft") else name)
    how = "install MARLaaS with its extra cpu or gpu: pip install 'marlaas[cpu]'"
    assert complaints() == [
        f"job.yaml:4: spec: its workers need peft, which this machine lacks; {how}",
        f"job.yaml:4: spec.rollout.engine: the Python package vllm is not installed; {how} (the engine `reference` does not need it, and is slow)",
    ]
    assert complaints(runnable=False) == []


@pytest.mark.parametrize("runnable", [True, False])
def test_replies_that_fill_the_models_own_context_are_refused(
    complaints: Complaints, tmp_path: Path, runnable: bool
) -> None:
    write_model(tmp_path / "m")
    assert complaints(PATH, "rollout: {maxTokens: 512}", runnable=runnable) == [
        "job.yaml:20: spec.rollout.maxTokens: maxTokens 512 leaves no room for a prompt: the base model of ModelPool 'tiny' has a "
        "context of 512 tokens; lower maxTokens or choose a pool with another model"
    ]
    write_model(tmp_path / "m", max_position_embeddings=1024)
    assert complaints(PATH, "rollout: {maxTokens: 512}", runnable=runnable) == []


def notes_of(manifest: Write, *edits: str, runnable: bool = False) -> list[str]:
    return [str(note) for note in load([manifest(*edits)], runnable=runnable).notes]


def test_a_longer_context_than_the_models_is_noted_where_somebody_wrote_it(manifest: Write, tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    assert notes_of(manifest, "model: {path: m}\n  rollout: {maxModelLen: 4096}") == [
        "job.yaml:6: spec.rollout.maxModelLen: maxModelLen 4096 exceeds the model's context of 512 tokens; engines accept conversations of up to 512 tokens"
    ]
    assert notes_of(manifest, PATH) == []


def test_what_would_keep_a_local_run_from_a_model_is_noted_where_a_cluster_may_run_it(
    manifest: Write, tmp_path: Path
) -> None:
    (note,) = notes_of(manifest, "model: {path: /nowhere/model}")
    assert note.startswith("job.yaml:5: spec.model.path: no base model in /nowhere/model: the folder does not exist")
    write_model(tmp_path / "m", HUGE)
    (note,) = notes_of(manifest, PATH)
    assert "and 16.0 GiB are available on this machine, so `marlaas run` refuses it here (in GiB, engine: " in note
    assert notes_of(manifest, "agents: [{name: policy, initFrom: {path: /nowhere}}]") == [
        f"{INIT_FROM} no PEFT adapter in /nowhere: the folder does not exist"
    ]


@pytest.mark.parametrize("runnable", [True, False])
def test_a_model_that_is_to_be_split_is_refused_before_an_engine_is(complaints: Complaints, runnable: bool) -> None:
    (line,) = complaints("model: {builtin: tiny}\n  tensorParallelSize: 2", runnable=runnable)
    assert line.startswith(
        "job.yaml:6: spec.tensorParallelSize: this version of MARLaaS supports only tensorParallelSize 1"
    )


def beginning(path: str) -> str:
    return f"agents: [{{name: policy, adapter: {{rank: 8, alpha: 16}}, initFrom: {{path: '{path}'}}}}]"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (beginning("~/a"), "initFrom.path: '~/a' begins with ~, which is not expanded; give the full path"),
        (beginning("half"), "initFrom.path: no PEFT adapter in {here}/half: it has no adapter_model.safetensors"),
        ("export: {path: file/below}", "export.path: {here}/file/below cannot be created: {here}/file is not a folder"),
    ],
)
def test_a_folder_that_cannot_be_used_is_told(complaints: Complaints, tmp_path: Path, edit: str, said: str) -> None:
    write_adapter(tmp_path / "half", "{}")
    (tmp_path / "half" / "adapter_model.safetensors").unlink()
    (tmp_path / "file").touch()
    (line,) = complaints(edit)
    assert line.endswith(said.replace("{here}", str(tmp_path)))


def write_adapter(folder: Path, config: str) -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.safetensors").touch()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"r": 8, "lora_alpha": 16.0}', []),
        ('{"r": 16, "lora_alpha": 16}', ["has rank 16, and adapter.rank of the agent is 8; they must be equal"]),
        ('{"r": 8, "lora_alpha": 32}', ["has alpha 32, and adapter.alpha of the agent is 16; they must be equal"]),
        ("no json", ["has rank nothing, and adapter.rank", "has alpha nothing, and adapter.alpha"]),
    ],
)
def test_an_adapter_of_another_size_is_told_with_both_numbers(
    complaints: Complaints, tmp_path: Path, config: str, said: list[str]
) -> None:
    write_adapter(tmp_path / "a", config)
    for line, words in zip(complaints(beginning("a")), said, strict=True):
        assert line.startswith(f"{INIT_FROM} the adapter in {tmp_path / 'a'} {words}")


def test_an_export_replaces_an_adapter_only_and_two_jobs_do_not_write_over_each_others(
    complaints: Complaints, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    assert complaints("export: {path: mine}") == []
    (tmp_path / "mine" / "thesis.tex").touch()
    said = f"{tmp_path / 'mine'} holds files other than an adapter; choose a new folder"
    assert complaints("export: {path: mine}") == [f"job.yaml:22: spec.export.path: {said}"]
    assert complaints("export: {path: mine}", runnable=False) == []
    (tmp_path / "mine" / "adapter_config.json").touch()
    assert complaints("export: {path: mine}") == [], "an adapter is replaced"
    job = "apiVersion: marlaas.dev/v1alpha1\nkind: RLJob\nmetadata: {name: b}\nspec:\n  poolRef: {name: tiny}"
    spec = "\n  environment: {name: reverse}\n  training: {steps: 2}\n  export: {path: ./out}"
    assert complaints(f"export: {{path: out}}\n---\n{job}{spec}") == [
        f"job.yaml:31: spec.export.path: {tmp_path / 'out'} is also the export path of the job at job.yaml:14; choose another"
    ]


def test_a_kl_reference_is_looked_into_like_an_adapter_to_begin_from(complaints: Complaints, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", json.dumps({"r": 4, "lora_alpha": 16}))
    for path, said in (("a", "has rank 4, and adapter.rank of the agent is 8"), ("b", "the folder does not exist")):
        (line,) = complaints(f"training: {{steps: 3, kl: {{reference: {{path: {path}}}}}}}")
        assert "spec.training.kl.reference.path: " in line
        assert said in line
