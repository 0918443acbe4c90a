"""What `marlaas init` writes is run as its owner would run it."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from marlaas.cli.app import build
from marlaas.cli.init import create, project
from marlaas_api.errors import InvalidInput


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("projects") / "first-sums"
    create(folder)
    return folder


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", *command]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_a_project_has_everything_and_nothing_is_left_to_fill_in(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names == {"first_sums.py", "test_first_sums.py", "job.yaml", "README.md", ".gitignore"}
    assert not [path.name for path in folder.iterdir() if "$" in path.read_text()]
    (_, job) = yaml.safe_load_all((folder / "job.yaml").read_text())
    assert job["metadata"]["name"] == "first-sums"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("pytest -q -p no:cacheprovider", "8 passed"),
        ("marlaas validate job.yaml", "12 steps of 8 x 8 episodes of first_sums:play on pool smollm2"),
        ("marlaas env play first_sums:play --reply none --reply 0", "I see no number"),
    ],
)
def test_its_tests_pass_its_manifest_is_valid_and_its_environment_plays(folder: Path, command: str, said: str) -> None:
    done = _run(folder, *command.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout
    assert "marlaas env play first_sums:play" in (folder / "README.md").read_text()


def test_its_code_is_in_good_form(folder: Path) -> None:
    for command in (("check", "--isolated", "--select", "E,F,I,B,UP"), ("format", "--check", "--isolated")):
        done = _run(folder, "ruff", *command, "--line-length", "120", ".")
        assert done.returncode == 0, done.stdout


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(InvalidInput, match="exists and is not empty"):
        create(tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="exists and is not empty"):
        create(tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("My Game", "for example my-game"),
        ("...", "is not a valid job name"),
        ("2048", "it must begin with a letter"),
        ("class", "must not be a keyword"),
        ("random", "would shadow"),
        ("marlaas", "would shadow"),
    ],
)
def test_a_name_that_cannot_be_used_is_told(name: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words.replace("?", r"\?")):
        project(name)


def test_the_command_tells_what_it_wrote_and_how_to_go_on(tmp_path: Path) -> None:
    arguments = ["init", str(tmp_path / "game-of-mine")]
    result = CliRunner().invoke(build(arguments), arguments)
    assert result.exit_code == 0
    assert str(tmp_path / "game-of-mine" / "game_of_mine.py") in result.stdout
    assert "marlaas run job.yaml --out runs/first" in result.stdout
