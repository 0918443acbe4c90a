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


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch):
    """Sets variables by the ends of their names; the others are unset."""

    def said(**variables: str) -> Elsewhere:
        for name in ("CONTEXT", "IMAGES", "LOAD", "WORKER", "VALUES"):
            monkeypatch.delenv(f"E2E_{name}", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(f"E2E_{name}", value)
        return Elsewhere.said()

    return said


def chart(said: Elsewhere) -> dict[str, object]:
    """The values that the words mean, over those of this machine's node."""
    words = [str(word) for word in said.chart_words()]
    return dict(word.split("=", 1) for flag, word in zip(words[0::2], words[1::2], strict=True) if flag == "--set")


def test_images_are_those_of_values_yaml_or_of_a_registry_or_a_whole_worker_image(say):
    values = yaml.safe_load((ROOT / "e2e" / "values.yaml").read_text())
    assert chart(say()) == {f"{part}.image": values[part]["image"] for part in ("operator", "worker", "nats")}
    registry = chart(say(CONTEXT="gke", IMAGES="registry.example.com/e2e/"))
    assert registry["nats.image"] == "registry.example.com/e2e/nats:1"
    *_, own = manifest("own-image")
    assert own["spec"]["environment"]["image"] == "registry.example.com/e2e/environment:1"
    whole = chart(say(CONTEXT="gke", WORKER="registry.example.com/worker:1"))
    assert whole["worker.image"] == "registry.example.com/worker:1"
    assert whole["worker.pythonEnvironment.claimName"] == whole["worker.modelCache.claimName"] == ""
    assert model_cache() == [], "it needs no folder of this machine"
    assert say(VALUES="mine.yaml").chart_words()[-2:] == ["--values", Path("mine.yaml").resolve()]


def test_the_command_is_given_the_archive_and_with_a_registry_the_name_that_is_in_it(say, tmp_path):
    archive, heard, program = tmp_path / "a.tar", tmp_path / "heard", tmp_path / "push"
    (tmp_path / "manifest.json").write_text(json.dumps([{"RepoTags": ["registry.example.com/e2e/x:1"]}]))
    subprocess.run(["tar", "-C", tmp_path, "-cf", archive, "manifest.json"], check=True)
    program.write_text(f'#!/bin/sh\necho "$@" > {heard}\n')
    program.chmod(0o755)
    for images, words in ({"IMAGES": "registry.example.com/e2e"}, ["registry.example.com/e2e/x:1"]), ({}, []):
        say(CONTEXT="gke", LOAD=f"{program} --insecure", **images)
        ClusterHandle(Path("kubeconfig"), "gke").import_image(archive)
        assert heard.read_text().split() == ["--insecure", str(archive), *words]
    say(CONTEXT="gke")
    ClusterHandle(Path("kubeconfig"), "gke").import_image(archive)  # without a command nothing is to be done


def test_only_images_need_packages_when_the_node_is_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setattr(packages, "_SEARCH", str(tmp_path))
    assert packages.missing_packages(node=False) == ["buildah", "debootstrap"]
    assert {"buildah", "containerd", "runc"} <= set(packages.missing_packages())
