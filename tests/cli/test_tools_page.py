"""Every command on docs/tools.md is one that the command takes, and its manifest piece is valid."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from marlaas.cli.app import build
from marlaas_api.kinds import ExportSpec

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")


def _commands() -> list[str]:
    blocks = re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    parts = [part.strip() for line in lines for part in re.split(r"&&|\|", line)]
    return [part for part in parts if part.startswith("marlaas ")]


@pytest.mark.parametrize("command", _commands())
def test_a_command_of_the_page_is_one_that_is_taken(command: str) -> None:
    words = shlex.split(command)[1:]
    tree = get_command(build(words))
    name, chosen, rest = tree.resolve_command(tree.make_context("marlaas", words), words)  # type: ignore[attr-defined]
    assert chosen is not None
    assert chosen.make_context(name, list(rest)).params


def test_the_page_has_every_command_that_looks_inside() -> None:
    named = {shlex.split(command)[1] for command in _commands()}
    assert {"init", "episodes", "plot", "chat"} <= named


def test_the_pages_piece_of_a_manifest_is_right() -> None:
    (piece,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    export = yaml.safe_load(piece)["spec"]["export"]
    assert ExportSpec.model_validate(export).trackers == ("tensorboard", "wandb", "mlflow")


@pytest.mark.parametrize("name", ["episodes", "plot", "chat", "init"])
def test_help_teaches_what_it_reads_and_how_it_ends(name: str) -> None:
    arguments = [name, "--help"]
    text = CliRunner().invoke(build(arguments), arguments).output
    assert "Exit code" in text
    assert f"marlaas {name}" in text
