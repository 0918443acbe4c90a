"""`marlaas models`, on a cache of its own."""

import json
import re
from pathlib import Path

import pytest
from tests.cli.conftest import invoke

from marlaas.manifest import load
from marlaas.models import UnknownModel, list_models, registry
from marlaas.models.architectures import ADAPTABLE


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MARLAAS_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")


def test_the_list_shows_size_and_state_smallest_first_to_people_and_machines():
    heading, tiny, smollm2 = invoke("models", "list").output.splitlines()
    assert heading.split() == ["NAME", "SIZE", "PREPARED", "DESCRIPTION"]
    assert tiny.startswith("tiny                   2.5 MB  no, about 50 s  0.6 M parameters")
    assert smollm2.startswith("smollm2-135m-instruct  542 MB  no, about 30 s  SmolLM2-135M-Instruct")
    prepared = registry._folder(registry._RECIPES["tiny"])  # a finished folder where the cache keeps the model
    prepared.mkdir(parents=True)
    assert "2.5 MB  yes " in invoke("models", "list").output
    facts = json.loads(invoke("models", "list", "--json").stdout)
    assert [one["name"] for one in facts] == [model.name for model in list_models()]
    assert [one["folder"] for one in facts] == [str(prepared), None]
    result = invoke("models", "prepare", "tiny")
    assert (result.exit_code, result.stdout) == (0, f"{prepared}\n"), "preparing prints the folder alone"
    error = invoke("models", "prepare", "tny").exception
    assert isinstance(error, UnknownModel)
    assert str(error).endswith("did you mean 'tiny'?")


ROOT = Path(__file__).parents[2]
EXAMPLES = sorted([*(ROOT / "examples").glob("*.yaml"), *(ROOT / "examples" / "agents").glob("*.yaml")])
MANY = sorted((ROOT / "examples" / "many").glob("*.yaml"))


@pytest.mark.parametrize("paths", [*([path] for path in EXAMPLES), MANY], ids=lambda paths: paths[0].stem)
def test_an_example_is_right_and_needs_no_remark(paths):
    manifest = load(paths, runnable=True)
    assert manifest.jobs
    assert [str(note) for note in manifest.notes] == []


def test_every_architecture_is_listed():
    listed = (ROOT / "docs" / "reference" / "models.md").read_text(encoding="utf-8").rpartition("## Architectures")[2]
    assert set(re.findall(r"`(\w+(?:ForCausalLM|LMHeadModel))`", listed)) == ADAPTABLE
