"""What a person says of a cluster of their own, and what becomes of it."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from marlaas_e2e import packages
from marlaas_e2e.elsewhere import Elsewhere
from marlaas_e2e.handle import ClusterHandle
from marlaas_e2e.platform import ROOT, manifest, model_cache

VARIABLES = ("E2E_CONTEXT", "E2E_IMAGES", "E2E_LOAD", "E2E_WORKER", "E2E_VALUES")


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch):
    """Sets variables by the ends of their names; the others are unset."""

    def said(**variables: str) -> Elsewhere:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(f"E2E_{name}", value)
        return Elsewhere.said()

    return said


def chart(said: Elsewhere) -> dict[str, object]:
    """The values that the words mean, over those of this machine's node."""
    words = [str(word) for word in said.chart_words()]
    assert words[0::2].count("--set") + words[0::2].count("--values") == len(words) // 2
    return dict(word.split("=", 1) for flag, word in zip(words[0::2], words[1::2], strict=True) if flag == "--set")


def test_with_nothing_said_images_are_those_of_values_yaml(say) -> None:
    values = yaml.safe_load((ROOT / "e2e" / "values.yaml").read_text())
    named = {f"{part}.image": values[part]["image"] for part in ("operator", "worker", "nats")}
    assert chart(say()) == named
    assert say() == Elsewhere()


def test_a_registry_has_every_image_and_is_told_its_name_which_without_one_the_archive_says(say) -> None:
    said = say(CONTEXT="gke", IMAGES="registry.example.com/e2e/", LOAD="crane push --insecure")
    assert said.image("operator") == "registry.example.com/e2e/operator:1"
    assert said.loading(Path("a.tar"), "registry.example.com/e2e/operator:1") == [
        *("crane", "push", "--insecure", Path("a.tar"), "registry.example.com/e2e/operator:1")
    ]
    assert chart(said)["nats.image"] == "registry.example.com/e2e/nats:1"
    (_, own) = manifest("own-image")
    assert own["spec"]["environment"]["image"] == "registry.example.com/e2e/environment:1"
    said = say(CONTEXT="kind-kind", LOAD="kind load image-archive")
    assert said.loading(Path("a.tar"), "e2e.local/operator:1") == ["kind", "load", "image-archive", Path("a.tar")]
    assert say(CONTEXT="kind-kind").loading(Path("a.tar"), "e2e.local/operator:1") is None


def test_a_whole_worker_image_needs_no_folder_of_this_machine(say) -> None:
    values = chart(say(CONTEXT="gke", WORKER="registry.example.com/worker:1"))
    assert values["worker.image"] == "registry.example.com/worker:1"
    assert values["worker.pythonEnvironment.claimName"] == values["worker.modelCache.claimName"] == ""
    assert model_cache() == []


def test_values_of_ones_own_come_last(say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert say(VALUES="mine.yaml").chart_words()[-2:] == ["--values", tmp_path / "mine.yaml"]


def test_the_command_is_given_the_archive_and_the_name_that_is_in_it(say, tmp_path: Path) -> None:
    archive, heard, program = tmp_path / "a.tar", tmp_path / "heard", tmp_path / "push"
    (tmp_path / "manifest.json").write_text(json.dumps([{"RepoTags": ["registry.example.com/e2e/x:1"]}]))
    subprocess.run(["tar", "-C", tmp_path, "-cf", archive, "manifest.json"], check=True)
    program.write_text(f'#!/bin/sh\necho "$@" > {heard}\n')
    program.chmod(0o755)
    say(CONTEXT="gke", IMAGES="registry.example.com/e2e", LOAD=str(program))
    ClusterHandle(Path("kubeconfig"), "gke").import_image(archive)
    assert heard.read_text().split() == [str(archive), "registry.example.com/e2e/x:1"]


def test_only_images_need_packages_when_the_node_is_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(packages, "_SEARCH", str(tmp_path))
    assert packages.missing_packages(node=False) == ["buildah", "debootstrap"]
    assert {"buildah", "containerd", "runc"} <= set(packages.missing_packages())
