"""Kept results count only for the sources that they were measured with."""

import subprocess
from pathlib import Path

import pytest
from bench.runs import kept
from bench.sources import sources


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
def test_a_change_of_the_sources_is_seen_committed_or_not(tree, name):
    before = sources(tree)
    (tree / name).write_text("2\n")
    changed = sources(tree)
    assert changed.digest != before.digest
    assert changed.commit == f"{before.commit} and changes"
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "-m", "second")
    assert sources(tree).digest == changed.digest
    assert sources(tree).commit not in (before.commit, changed.commit)


def test_other_files_change_the_commit_only(tree):
    before = sources(tree)
    (tree / "docs" / "c.md").write_text("2\n")
    (tree / "operator" / "__pycache__").mkdir()
    (tree / "operator" / "__pycache__" / "a.pyc").write_text("2\n")
    git(tree, "commit", "--quiet", "-am", "second")
    assert (sources(tree).digest, sources(tree).commit == before.commit) == (before.digest, False)


def test_a_result_is_measured_again_after_a_change_and_told_with_its_commit(tree, capsys):
    path, values = tree / "kept.json", iter((1, 2))

    def measure() -> dict[str, int]:
        return {"value": next(values)}

    assert kept(path, "same", measure, tree) == {"value": 1}
    assert capsys.readouterr().err == ""
    assert kept(path, "same", measure, tree) == {"value": 1}
    assert capsys.readouterr().err == f"kept: kept result of commit {sources(tree).commit}\n"
    (tree / "workers" / "b.py").write_text("2\n")
    assert kept(path, "same", measure, tree) == {"value": 2}
