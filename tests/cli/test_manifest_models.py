"""What is said of a pool's model when its folder lies on this machine; nothing is loaded."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.models.model_folders import write_model

from marlaas.manifest import load, models
from marlaas.models.memory import Machine

Complaints = Callable[..., list[str]]
BUILTIN, JOB = "{builtin: tiny}", "poolRef: {name: tiny}"
GIB = 2**30
HUGE = {"model.layers.0.mlp.up_proj.weight": (2**20, 2**20)}


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "machine", lambda: Machine(16 * GIB, 16 * GIB))
    monkeypatch.setattr(models, "has_gpu", lambda: False)


def targets(*names: str) -> tuple[str, str]:
    agent = f"agents: [{{name: policy, adapter: {{targets: [{', '.join(names)}]}}}}]"
    return JOB, f"{JOB}\n  {agent}"


@pytest.mark.parametrize("runnable", [True, False])
def test_layers_that_the_model_has_are_right(complaints: Complaints, tmp_path: Path, runnable: bool) -> None:
    write_model(tmp_path / "m")
    path = (BUILTIN, "{path: m}")
    assert complaints(path, targets("q_proj", "down_proj"), runnable=runnable) == []


@pytest.mark.parametrize("runnable", [True, False])
def test_a_layer_that_the_model_lacks_is_answered_with_the_nearest(
    complaints: Complaints, tmp_path: Path, runnable: bool
) -> None:
    write_model(tmp_path / "m")
    assert complaints((BUILTIN, "{path: m}"), targets("down_proj", "qproj"), runnable=runnable) == [
        "job.yaml:19: spec.agents[0].adapter.targets[1]: the model has no linear layer 'qproj'; it has down_proj and q_proj; "
        "did you mean 'q_proj'?"
    ]


def test_an_architecture_that_vllm_does_not_adapt_is_refused(complaints: Complaints, tmp_path: Path) -> None:
    write_model(tmp_path / "m", architectures=["GPT2LMHeadModel"])
    (line,) = complaints((BUILTIN, "{path: m}"))
    assert line.startswith(
        "job.yaml:5: spec.model.path: the model's architecture is 'GPT2LMHeadModel', and vLLM serves LoRA"
    )


def test_the_reference_engine_takes_any_architecture(complaints: Complaints, tmp_path: Path) -> None:
    write_model(tmp_path / "m", architectures=["GPT2LMHeadModel"])
    assert complaints((BUILTIN, "{path: m}\n  rollout: {engine: reference}")) == []


def test_a_model_without_linear_layers_has_nothing_to_train(complaints: Complaints, tmp_path: Path) -> None:
    write_model(tmp_path / "m", {"model.norm.weight": (8,)})
    assert complaints((BUILTIN, "{path: m}")) == [
        "job.yaml:5: spec.model.path: the model has no linear layers for an adapter; choose another model"
    ]


def test_a_damaged_file_is_named(complaints: Complaints, tmp_path: Path) -> None:
    (write_model(tmp_path / "m") / "model.safetensors").write_bytes(b"x")
    assert complaints((BUILTIN, "{path: m}")) == [
        f"job.yaml:5: spec.model.path: no base model in {tmp_path / 'm'}: model.safetensors is damaged: it has no safetensors header"
    ]


@pytest.mark.parametrize("path", ["/nowhere/model", "."])
def test_a_path_of_another_machine_is_not_judged(complaints: Complaints, path: str) -> None:
    assert complaints((BUILTIN, f"{{path: {path}}}"), targets("anything"), runnable=False) == []


def test_a_model_too_big_for_this_machine_is_refused_with_the_numbers(complaints: Complaints, tmp_path: Path) -> None:
    write_model(tmp_path / "m", HUGE)
    (line,) = complaints((BUILTIN, "{path: m}"))
    assert line.startswith(
        "job.yaml:5: spec.model: about 8201.2 GiB of memory are needed, and 16.0 GiB are available (in GiB, engine: "
    )
    assert complaints((BUILTIN, "{path: m}"), runnable=False) == [], "another machine may run it"


def test_a_gpu_has_memory_of_its_own(complaints: Complaints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "has_gpu", lambda: True)
    write_model(tmp_path / "m", HUGE)
    assert complaints((BUILTIN, "{path: m}")) == []


def test_what_only_others_leave_no_room_for_is_a_note(
    manifest: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "machine", lambda: Machine(16 * GIB, GIB))
    write_model(tmp_path / "m")
    (note,) = load([manifest((BUILTIN, "{path: m}"))]).notes
    assert "about 2.7 GiB of memory are needed, and 1.0 GiB are available now, because of what else runs" in str(note)


def test_a_hub_model_in_the_cache_is_looked_into_and_one_that_is_not_is_left_to_the_workers(
    complaints: Complaints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    hub = (BUILTIN, "{hub: {id: some/model}}")
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


def test_a_wrong_layer_of_a_builtin_model_is_told_once(complaints: Complaints) -> None:
    (line,) = complaints(targets("qproj"))
    assert line.endswith("found 'qproj'; did you mean 'q_proj'?")


LONG = ("rollout: {groupSize: 4}", "rollout: {groupSize: 4, maxTokens: 512}")


@pytest.mark.parametrize("runnable", [True, False])
def test_replies_that_fill_the_models_own_context_are_refused(
    complaints: Complaints, tmp_path: Path, runnable: bool
) -> None:
    write_model(tmp_path / "m")
    assert complaints((BUILTIN, "{path: m}"), LONG, runnable=runnable) == [
        "job.yaml:20: spec.rollout.maxTokens: maxTokens 512 leaves no room for a prompt: the base model of ModelPool 'tiny' has a "
        "context of 512 tokens; lower maxTokens or choose a pool with another model"
    ]
    write_model(tmp_path / "m", max_position_embeddings=1024)
    assert complaints((BUILTIN, "{path: m}"), LONG, runnable=runnable) == []


def notes_of(manifest: Callable[..., Path], *edits: tuple[str, str], runnable: bool = False) -> list[str]:
    return [str(note) for note in load([manifest(*edits)], runnable=runnable).notes]


def test_a_longer_context_than_the_models_is_noted_where_somebody_wrote_it(
    manifest: Callable[..., Path], tmp_path: Path
) -> None:
    write_model(tmp_path / "m")
    assert notes_of(manifest, (BUILTIN, "{path: m}\n  rollout: {maxModelLen: 4096}")) == [
        "job.yaml:6: spec.rollout.maxModelLen: maxModelLen 4096 exceeds the model's context of 512 tokens; engines accept conversations of up to 512 tokens"
    ]
    assert notes_of(manifest, (BUILTIN, "{path: m}")) == []


def test_what_would_keep_a_local_run_from_a_model_is_noted_where_a_cluster_may_run_it(
    manifest: Callable[..., Path], tmp_path: Path
) -> None:
    (note,) = notes_of(manifest, (BUILTIN, "{path: /nowhere/model}"))
    assert note.startswith("job.yaml:5: spec.model.path: no base model in /nowhere/model: the folder does not exist")
    write_model(tmp_path / "m", HUGE)
    (note,) = notes_of(manifest, (BUILTIN, "{path: m}"))
    assert "and 16.0 GiB are available on this machine, so `marlaas run` refuses it here (in GiB, engine: " in note
    init = (JOB, f"{JOB}\n  agents: [{{name: policy, initFrom: {{path: /nowhere}}}}]")
    assert notes_of(manifest, init) == [
        "job.yaml:19: spec.agents[0].initFrom.path: no PEFT adapter in /nowhere: the folder does not exist"
    ]


@pytest.mark.parametrize("runnable", [True, False])
def test_accelerators_that_this_machine_lacks_are_noted(
    manifest: Callable[..., Path], tmp_path: Path, runnable: bool
) -> None:
    write_model(tmp_path / "m")
    asked = (BUILTIN, "{path: m}\n  trainer: {gpus: 1}")
    assert notes_of(manifest, asked, runnable=runnable) == [
        "job.yaml:6: spec.trainer.gpus: gpus is 1, and this machine has no GPU: `marlaas run` computes on the CPU here"
    ]


@pytest.mark.parametrize("runnable", [True, False])
def test_a_model_that_is_to_be_split_is_refused_before_an_engine_is(complaints: Complaints, runnable: bool) -> None:
    (line,) = complaints((BUILTIN, f"{BUILTIN}\n  tensorParallelSize: 2"), runnable=runnable)
    assert line.startswith(
        "job.yaml:6: spec.tensorParallelSize: this version of MARLaaS supports only tensorParallelSize 1"
    )
