"""A right manifest, and what is said when it is edited."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from marlaas.cli.app import build
from marlaas.manifest import InvalidManifest, load

MANIFEST = (Path(__file__).parent / "manifest.yaml").read_text("utf-8")


def invoke(*arguments: str, typed=None):
    return CliRunner().invoke(build(arguments), list(arguments), input=typed)


def _replacement(line):
    """The last line with the same key and `line` in its place; without such a line, the job's spec with `line` at its end."""
    key = line.partition(":")[0] + ":"
    lines = [known.strip() for known in MANIFEST.splitlines()]
    old = next((known for known in reversed(lines) if known.startswith(key)), None)
    return (old, line) if old else (lines[-1], f"{lines[-1]}\n  {line}")


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
