import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tables import data

from marlaas.models.cache import build_once, cache_folder
from marlaas.models.errors import CacheFull, CacheUnusable

BUILDER = data(__file__, "builder")
FULL = "I/O error: No space left on device (os error 28)"


def start(folder):
    """Start a builder of `m` that stops half way until it reads a line; return when it is about to ask for the folder."""
    code = [sys.executable, "-c", BUILDER, str(folder / "m"), str(folder / "calls")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout.readline() == "started\n"
    return process


def never(folder):
    raise AssertionError(f"built again: {folder}")


def refuse(text):
    raise RuntimeError(text)


def visible(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_killed_half_way_nothing_is_visible_then_of_two_processes_one_builds_and_both_see_it_whole(tmp_path):
    process = start(tmp_path)
    assert process.stdout.readline() == "half way\n"
    process.kill()
    process.communicate()
    assert not (tmp_path / "m").exists()
    builder = start(tmp_path)
    assert builder.stdout.readline() == "half way\n"
    waiter = start(tmp_path)
    assert [process.communicate("\n")[0] for process in (builder, waiter)] == ["['first', 'second']\n"] * 2
    assert len((tmp_path / "calls").read_text().split()) == 2, "the one that was killed, and one of the two"
    assert build_once(tmp_path / "m", never, 0) == tmp_path / "m"
    assert visible(tmp_path) == ["calls", "m"]


def test_everyone_can_read_what_is_built(tmp_path):
    def build(folder):
        (folder / "sub").mkdir()
        (folder / "sub" / "secret").touch(0o600)

    target = build_once(tmp_path / "models" / "m", build, 0)
    assert (target / "sub" / "secret").stat().st_mode & 0o777 == 0o644


def test_too_little_room_or_a_folder_that_cannot_be_written_is_told_before_anything_is_built(tmp_path):
    with pytest.raises(CacheFull, match=r"the disk of .* is full: 1073741824 MiB are needed; .*MARLAAS_CACHE"):
        build_once(tmp_path / "m", never, 2**50)
    (tmp_path / "models").write_text("in the way")
    with pytest.raises(CacheUnusable, match=r"cannot write into the cache .*/models.*: .*MARLAAS_CACHE"):
        build_once(tmp_path / "models" / "m", never, 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    ("last_act", "error"),
    [
        (lambda: refuse("no good"), RuntimeError),
        (lambda: refuse(FULL), CacheFull),  # a library tells it in words
        (lambda: Path("/dev/full").write_text("text"), CacheFull),
    ],
)
def test_a_build_that_fails_leaves_nothing_and_a_full_disk_is_told_as_such(tmp_path, last_act, error):
    def build(folder):
        (folder / "file").write_text("text")
        last_act()

    with pytest.raises(error):
        build_once(tmp_path / "m", build, 0)
    assert visible(tmp_path) == []


def test_where_the_cache_is(monkeypatch, tmp_path):
    for name in ("MARLAAS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value, expected in (
        ("HOME", tmp_path, ".cache/marlaas"),
        ("XDG_CACHE_HOME", tmp_path / "xdg", "xdg/marlaas"),
        ("MARLAAS_CACHE", "~/own", "own"),
    ):
        monkeypatch.setenv(name, str(value))
        assert cache_folder() == tmp_path / expected
