"""An adapter to begin from is looked into before anything starts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Complaints = Callable[..., list[str]]
PLACE = "job.yaml:19: spec.agents[0].initFrom.path:"


def beginning(path: str) -> tuple[str, str]:
    job = "poolRef: {name: tiny}"
    return job, f"{job}\n  agents: [{{name: policy, adapter: {{rank: 8, alpha: 16}}, initFrom: {{path: '{path}'}}}}]"


def write_adapter(folder: Path, config: str) -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.safetensors").touch()


def test_an_adapter_of_the_agents_size_is_right(complaints: Complaints, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", json.dumps({"r": 8, "lora_alpha": 16.0}))
    assert complaints(beginning("a")) == []


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"r": 16, "lora_alpha": 16}', ["has rank 16, and adapter.rank of the agent is 8; they must be equal"]),
        ('{"r": 8, "lora_alpha": 32}', ["has alpha 32, and adapter.alpha of the agent is 16; they must be equal"]),
        ("no json", ["has rank nothing, and adapter.rank", "has alpha nothing, and adapter.alpha"]),
    ],
)
def test_an_adapter_of_another_size_is_told_with_both_numbers(
    complaints: Complaints, tmp_path: Path, config: str, said: list[str]
) -> None:
    write_adapter(tmp_path / "a", config)
    lines = complaints(beginning("a"))
    assert [
        line.startswith(f"{PLACE} the adapter in {tmp_path / 'a'} {words}")
        for line, words in zip(lines, said, strict=True)
    ] == [True] * len(said)


def test_a_folder_that_is_half_an_adapter_is_told(complaints: Complaints, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", "{}")
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    assert complaints(beginning("a")) == [
        f"{PLACE} no PEFT adapter in {tmp_path / 'a'}: it has no adapter_model.safetensors"
    ]


def test_a_home_that_no_worker_knows_is_told(complaints: Complaints) -> None:
    assert complaints(beginning("~/a")) == [f"{PLACE} '~/a' begins with ~, which is not expanded; give the full path"]


def exporting(path: object) -> tuple[str, str]:
    return "training: {steps: 3}", f"training: {{steps: 3}}\n  export: {{path: '{path}'}}"


def test_a_folder_with_something_else_in_it_is_no_export(complaints: Complaints, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert complaints(exporting("mine")) == []
    (tmp_path / "mine" / "thesis.tex").touch()
    said = f"{tmp_path / 'mine'} holds files other than an adapter; choose a new folder"
    assert complaints(exporting("mine")) == [f"job.yaml:22: spec.export.path: {said}"]
    assert complaints(exporting("mine"), runnable=False) == []
    (tmp_path / "mine" / "adapter_config.json").touch()
    assert complaints(exporting("mine")) == [], "an adapter is replaced"


def test_a_folder_that_cannot_be_made_is_told_before_the_training(complaints: Complaints, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert complaints(exporting("file/below")) == [
        f"job.yaml:22: spec.export.path: {tmp_path / 'file' / 'below'} cannot be created: {tmp_path / 'file'} is not a folder"
    ]


def test_two_jobs_do_not_write_over_each_others_export(complaints: Complaints, tmp_path: Path) -> None:
    old, new = exporting("out")
    second = (
        new
        + "\n---\napiVersion: marlaas.dev/v1alpha1\nkind: RLJob\nmetadata: {name: b}\nspec:\n"
        + "".join(
            f"  {line}\n"
            for line in (
                "poolRef: {name: tiny}",
                "environment: {name: reverse}",
                "training: {steps: 2}",
                "export: {path: ./out}",
            )
        )
    )
    assert complaints((old, second)) == [
        f"job.yaml:31: spec.export.path: {tmp_path / 'out'} is also the export path of the job at job.yaml:14; choose another"
    ]


def test_a_kl_reference_is_looked_into_like_an_adapter_to_begin_from(complaints: Complaints, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", json.dumps({"r": 4, "lora_alpha": 16}))
    for path, said in (("a", "has rank 4, and adapter.rank of the agent is 8"), ("b", "the folder does not exist")):
        training = f"training: {{steps: 3, kl: {{reference: {{path: {path}}}}}}}"
        (line,) = complaints(("training: {steps: 3}", training))
        assert "spec.training.kl.reference.path: " in line
        assert said in line
