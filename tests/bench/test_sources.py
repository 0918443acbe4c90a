"""Kept results count only for the sources that they were measured with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.runs import kept
from bench.sources import ROOT, Sources, python_path, sources


def git(tree: Path, *words: str) -> None:
    settings = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    subprocess.run(["git", *settings, *words], cwd=tree, check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("operator/api/a.py", "workers/b.py", "locks/cpu.txt", "docs/c.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


@pytest.mark.parametrize("name", ["operator/api/a.py", "workers/new.py", "locks/cpu.txt"])
def test_a_change_of_the_sources_is_seen_committed_or_not(tree: Path, name: str) -> None:
    before = sources(tree)
    (tree / name).write_text("2\n")
    changed = sources(tree)
    assert changed.digest != before.digest
    assert changed.commit == f"{before.commit} and changes"
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "-m", "second")
    assert sources(tree).digest == changed.digest
    assert sources(tree).commit not in (before.commit, changed.commit)


def test_other_files_change_the_commit_only(tree: Path) -> None:
    before = sources(tree)
    (tree / "docs" / "c.md").write_text("2\n")
    (tree / "operator" / "__pycache__").mkdir()
    (tree / "operator" / "__pycache__" / "a.pyc").write_text("2\n")
    assert sources(tree).digest == before.digest
    git(tree, "commit", "--quiet", "-am", "second")
    assert sources(tree).digest == before.digest
    assert sources(tree).commit != before.commit


def test_a_file_that_moves_is_a_change(tree: Path) -> None:
    before = sources(tree)
    (tree / "workers" / "b.py").rename(tree / "workers" / "c.py")
    assert sources(tree).digest != before.digest


def test_without_git_the_digest_still_tells_sources_apart(tree: Path) -> None:
    (tree / ".git").rename(tree.parent / f"{tree.name}-git")
    assert sources(tree) == Sources("unknown", sources(tree).digest)


def test_a_result_is_measured_again_after_a_change_and_told_with_its_commit(tree: Path, capsys) -> None:
    path, values = tree / "kept.json", iter((1, 2))

    def measure() -> dict[str, int]:
        return {"value": next(values)}

    assert kept(path, "same", measure, tree) == {"value": 1}
    assert capsys.readouterr().err == ""
    assert kept(path, "same", measure, tree) == {"value": 1}
    assert capsys.readouterr().err == f"kept: kept result of commit {sources(tree).commit}\n"
    (tree / "workers" / "b.py").write_text("2\n")
    assert kept(path, "same", measure, tree) == {"value": 2}


def test_processes_run_the_code_of_the_tree() -> None:
    script = "import marlaas, marlaas_api, operator; print(marlaas.__file__, marlaas_api.__file__, operator.add(1, 2))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env=os.environ | {"PYTHONPATH": python_path(ROOT, Path("/first"))},
        capture_output=True,
        text=True,
        check=True,
    )
    one, two, added = done.stdout.split()
    assert Path(one).is_relative_to(ROOT / "workers")
    assert Path(two).is_relative_to(ROOT / "operator")
    assert added == "3", "the folder `operator` hides no module"
