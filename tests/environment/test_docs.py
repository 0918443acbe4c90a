"""What docs/reference/environments.md and docs/how-to/openai.md show: files are written, commands are run and print what is shown, manifests' environments can be made."""

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from tests.environment.playing import play
from typer.testing import CliRunner

from marlaas.cli.env import app
from marlaas.envs import BUILTINS
from marlaas.envs.loading import resolve
from marlaas.envs.puzzles import dataset_names
from marlaas_api.kinds import EnvironmentSpec

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "reference" / "environments.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    language: str
    text: str


BLOCKS = [Block(*found.groups()) for found in FENCE.finditer(PAGE.read_text())]
OPENAI = [Block(*found) for found in FENCE.findall((DOCS / "how-to" / "openai.md").read_text())]


def blocks(language: str) -> list[str]:
    return [block.text for block in BLOCKS if block.language == language]


def commands() -> Iterator[tuple[str, str]]:
    """Every command with the output that is shown below it."""
    for command, shown in itertools.pairwise(BLOCKS):
        if command.language == "bash":
            assert shown.language == "text", command
            yield command.text, shown.text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the page shows."""
    for text in blocks("python"):
        if named := re.match(r"# (\w+\.py)\n", text):
            (tmp_path / named[1]).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def squeezed(text: str) -> list[str]:
    """Lines without the columns' padding, and without times."""
    lines = [re.sub(r" {2,}", "  ", line).rstrip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("seconds in tools")]


def test_there_are_blocks_of_every_kind() -> None:
    assert {block.language for block in BLOCKS} == {"python", "bash", "text", "yaml", "dockerfile"}
    assert len(BLOCKS) * 2 == PAGE.read_text().count("\n```"), "a block has no language"


@pytest.mark.parametrize(("command", "shown"), list(commands()))
def test_a_command_prints_what_is_shown(folder: Path, command: str, shown: str) -> None:
    program, environment, *words = shlex.split(command)
    assert (program, environment) == ("marlaas", "env")
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    printed = squeezed(result.output)
    assert [line for line in squeezed(shown) if line not in printed] == [], result.output


@pytest.mark.parametrize("text", blocks("python"))
def test_python_runs(folder: Path, text: str) -> None:
    module = ModuleType("of_the_page")
    exec(compile(text, str(PAGE), "exec"), vars(module))
    for name, function in list(vars(module).items()):
        if name.startswith("test_"):
            function()


@pytest.mark.parametrize("text", blocks("yaml"))
def test_environments_of_manifests_can_be_made(folder: Path, text: str) -> None:
    environment = EnvironmentSpec.model_validate(yaml.safe_load(text)["environment"])
    *served, own = environment.entrypoint or ("marlaas", "env", "serve", "")
    assert served == ["marlaas", "env", "serve"]
    resolve(environment.name or own, environment.args).create()


def test_what_the_page_counts_is_so() -> None:
    (text,) = [text for text in blocks("python") if text.startswith("# sums.py")]
    code = [line for line in text.splitlines()[3:] if line.strip()]
    assert len(code) <= 10, "the rubric takes ten lines"
    page = PAGE.read_text()
    assert f"({len(dataset_names())}), in one turn" in page
    assert all(f"### {name}" in page for name in BUILTINS if name not in ("calculator", "reverse"))


def test_the_agent_of_the_openai_page_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = (block.text for block in OPENAI if block.language == "python")
    (tmp_path / "adder.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    replies: list[str] = []

    def answer(request) -> str:
        if request.parent is None:
            replies.append(str(sum(map(int, re.findall(r"\d+", request.append[0].content)))))
            return "It is " + replies[0]
        return replies[0]

    outcome, channel = play("adder:play", {}, answer)
    assert outcome.rewards == {"policy": 1.0}
    assert [asked.request.parent for asked in channel.asked] == [None, 0]


def test_the_environments_of_the_openai_pages_manifests_are_found() -> None:
    found = [yaml.safe_load(block.text)["environment"] for block in OPENAI if block.language == "yaml"]
    names = [resolve(environment["name"], environment["args"]).name for environment in found]
    assert names == ["marlaas.verifiers:Verifiers", "marlaas.verifiers:VerifiersTeam"]
