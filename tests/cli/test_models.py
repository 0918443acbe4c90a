"""`marlaas models`, on a cache of its own."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from marlaas.cli.app import build
from marlaas.models import UnknownModel, list_models


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARLAAS_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")


def _invoke(*arguments: str) -> Result:
    return CliRunner().invoke(build(arguments), list(arguments))


def _pretend_prepared(name: str) -> Path:
    """Put a finished folder where the cache keeps the model."""
    from marlaas.models import registry

    folder = registry._folder(registry._RECIPES[name])
    folder.mkdir(parents=True)
    return folder


def test_the_list_shows_size_and_state_smallest_first() -> None:
    result = _invoke("models", "list")
    heading, tiny, smollm2 = result.output.splitlines()
    assert heading.split() == ["NAME", "SIZE", "PREPARED", "DESCRIPTION"]
    assert tiny.startswith("tiny                   2.5 MB  no, about 50 s  0.6 M parameters")
    assert smollm2.startswith("smollm2-135m-instruct  542 MB  no, about 30 s  SmolLM2-135M-Instruct")


def test_a_prepared_model_is_shown_as_such_to_people_and_machines() -> None:
    folder = _pretend_prepared("tiny")
    assert "2.5 MB  yes " in _invoke("models", "list").output
    facts = json.loads(_invoke("models", "list", "--json").stdout)
    assert [one["name"] for one in facts] == [model.name for model in list_models()]
    assert [one["folder"] for one in facts] == [str(folder), None]


def test_preparing_prints_the_folder_alone() -> None:
    folder = _pretend_prepared("tiny")
    result = _invoke("models", "prepare", "tiny")
    assert (result.exit_code, result.stdout) == (0, f"{folder}\n")


def test_an_unknown_model_gets_the_nearest_name() -> None:
    result = _invoke("models", "prepare", "tny")
    assert isinstance(result.exception, UnknownModel)
    assert str(result.exception).endswith("did you mean 'tiny'?")


@pytest.mark.parametrize(
    ("command", "example"), [("list", "marlaas models list"), ("prepare", "marlaas models prepare tiny")]
)
def test_every_subcommands_help_has_an_example(command: str, example: str) -> None:
    assert f"Example: {example}" in _invoke("models", command, "--help").output
