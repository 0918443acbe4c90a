"""A right manifest, and what is said when it is edited."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from marlaas.cli.app import build
from marlaas.envs.loading import BUILTINS
from marlaas.manifest import InvalidManifest, load, references

FIXED = set(BUILTINS) - {"dataset"}
"""The environments whose answers depend on nothing but their arguments."""
MANIFEST = (Path(__file__).parent / "manifest.yaml").read_text("utf-8")


def invoke(*arguments: str, typed=None):
    return CliRunner().invoke(build(arguments), list(arguments), input=typed)


def _replacement(line):
    """The last line with the same key and `line` in its place; without such a line, the job's spec with `line` at its end."""
    key = line.partition(":")[0] + ":"
    lines = [known.strip() for known in MANIFEST.splitlines()]
    old = next((known for known in reversed(lines) if known.startswith(key)), None)
    return (old, line) if old else (lines[-1], f"{lines[-1]}\n  {line}")


@pytest.fixture(scope="session")
def _checks():
    """Answers to questions about environments, each given by a process of its own, as `marlaas validate` asks."""
    return {}


@pytest.fixture(autouse=True)
def _a_question_about_builtin_environments_is_asked_once(monkeypatch, _checks):
    ask = references._ask

    def known(folder, given, timeout_s):
        if not {name for name, *_ in json.loads(given)} <= FIXED or list(Path(folder).glob("*.py")):
            return ask(folder, given, timeout_s)
        settings = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        key = (given, timeout_s, *sorted(settings.items()))
        if key not in _checks:
            _checks[key] = ask(folder, given, timeout_s)
        return _checks[key]

    monkeypatch.setattr(references, "_ask", known)


@pytest.fixture
def manifest(tmp_path, monkeypatch):
    """Writes the right manifest into an empty folder, which is also the working directory.

    An edit is a pair (old, new), or a line that replaces the one with its key, or is added to the job.
    """
    monkeypatch.chdir(tmp_path)

    def write(*edits: str | tuple[str, str]):
        text = MANIFEST
        for edit in edits:
            old, new = _replacement(edit) if isinstance(edit, str) else edit
            assert text.count(old) == 1, f"{old!r} must stand once"
            text = text.replace(old, new)
        Path("job.yaml").write_text(text, encoding="utf-8")
        return Path("job.yaml")

    return write


@pytest.fixture
def complaints(manifest):
    def of(*edits: str | tuple[str, str], runnable=True):
        path = manifest(*edits)
        try:
            load([path], runnable=runnable)
        except InvalidManifest as error:
            return str(error).splitlines()
        return []

    return of
