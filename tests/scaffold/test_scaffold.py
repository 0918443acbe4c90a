"""What `marlaas init` writes is run as its owner would run it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.tables import rows
from typer.testing import CliRunner

from marlaas.cli.app import build
from marlaas.cli.init import create, project
from marlaas.manifest import load
from marlaas_api.errors import InvalidInput
from marlaas_api.names import DNS_LABEL


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("projects") / "first_sums"  # the name that the README uses
    create(folder)
    return folder


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", *command]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_a_project_has_everything_and_nothing_is_left_to_fill_in(folder):
    names = {path.name for path in folder.iterdir()}
    assert names == {"first_sums.py", "test_first_sums.py", "job.yaml", "README.md", ".gitignore"}
    assert not [path.name for path in folder.iterdir() if "$" in path.read_text()]
    (_, job) = yaml.safe_load_all((folder / "job.yaml").read_text())
    assert job["metadata"]["name"] == "first-sums"


@pytest.mark.parametrize(("command", "said"), rows(__file__, "commands"))
def test_its_tests_pass_its_manifest_is_valid_and_its_environment_plays(folder, command, said):
    done = _run(folder, *command.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout
    assert "marlaas env play first_sums:play" in (folder / "README.md").read_text()


def test_its_code_is_in_good_form(folder):
    for command in (("check", "--isolated", "--select", "E,F,I,B,UP"), ("format", "--check", "--isolated")):
        done = _run(folder, "ruff", *command, "--line-length", "120", ".")
        assert done.returncode == 0, done.stdout


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(InvalidInput, match="exists and is not empty"):
        create(tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="exists and is not empty"):
        create(tmp_path / "file")


@pytest.mark.parametrize(("folder", "job", "module"), rows(__file__, "names"))
def test_any_folder_name_gives_a_job_and_a_module(folder, job, module):
    texts = project(folder)
    assert {f"{module}.py", f"test_{module}.py"} < texts.keys()
    (_, manifest) = yaml.safe_load_all(texts["job.yaml"])
    assert manifest["metadata"]["name"] == job
    assert re.fullmatch(DNS_LABEL, job)
    assert manifest["spec"]["environment"]["name"] == f"{module}:play"


def test_a_project_of_an_odd_name_below_other_folders_is_valid(tmp_path):
    folder = tmp_path / "a b" / "Ein Spiel, 2048"
    create(folder)
    manifest = load([folder / "job.yaml"], runnable=True)
    assert [job.metadata.name for job in manifest.jobs] == ["ein-spiel-2048"]
    arguments = ["init", str(tmp_path / "another one")]
    told = CliRunner().invoke(build(arguments), arguments).stdout
    lines = (
        f"cd '{tmp_path}/another one'",
        f"{tmp_path / 'another one' / 'another_one.py'}",
        "marlaas run job.yaml --out runs/first",
    )
    assert [line for line in lines if line not in told] == []
