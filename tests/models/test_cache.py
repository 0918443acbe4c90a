import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from marlaas.models.cache import build_once, cache_folder
from marlaas.models.errors import CacheFull, CacheUnusable

BUILDER = """
import os, sys
from pathlib import Path
from marlaas.models.cache import build_once

target, calls = map(Path, sys.argv[1:])

def build(folder):
    with calls.open("a") as file:
        file.write(f"{os.getpid()}\\n")
    (folder / "first").write_text("half")
    print("half way", flush=True)
    sys.stdin.readline()
    (folder / "second").write_text("whole")

print("started", flush=True)
build_once(target, build, 0)
print(sorted(path.name for path in target.iterdir()), flush=True)
"""


def start(target: Path, calls: Path) -> "subprocess.Popen[str]":
    """Start a builder that stops half way until it reads a line; return when it is about to ask for the folder."""
    code = [sys.executable, "-c", BUILDER, str(target), str(calls)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert next_line(process) == "started"
    return process


def next_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def write_one_file(folder: Path) -> None:
    (folder / "file").write_text("text")


def never(folder: Path) -> None:
    raise AssertionError(f"built again: {folder}")


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_a_folder_is_built_once_and_everyone_can_read_it(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "sub").mkdir()
        (folder / "sub" / "secret").touch(0o600)

    target = build_once(tmp_path / "models" / "m", build, 0)
    assert (target / "sub" / "secret").stat().st_mode & 0o777 == 0o644
    assert build_once(target, never, 0) == target
    assert visible(target.parent) == ["m"]


def test_killed_half_way_leaves_nothing_visible_and_the_next_build_succeeds(tmp_path: Path) -> None:
    target = tmp_path / "m"
    process = start(target, tmp_path / "calls")
    assert next_line(process) == "half way"
    process.kill()
    process.communicate()
    assert not target.exists()
    build_once(target, write_one_file, 0)
    assert visible(target) == ["file"]
    assert visible(tmp_path) == ["calls", "m"]


def test_of_two_processes_one_builds_and_both_see_it_whole(tmp_path: Path) -> None:
    builder = start(tmp_path / "m", tmp_path / "calls")
    assert next_line(builder) == "half way"
    waiter = start(tmp_path / "m", tmp_path / "calls")
    assert [process.communicate("\n")[0] for process in (builder, waiter)] == ["['first', 'second']\n"] * 2
    assert len((tmp_path / "calls").read_text().split()) == 1


def test_too_little_room_is_told_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(CacheFull, match=r"the disk of .* is full: 1073741824 MiB are needed; .*MARLAAS_CACHE"):
        build_once(tmp_path / "m", never, 2**50)


FULL = "I/O error: No space left on device (os error 28)"


def refuse(text: str) -> None:
    raise RuntimeError(text)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    ("last_act", "error"),
    [
        (lambda: refuse("no good"), RuntimeError),
        (lambda: refuse(FULL), CacheFull),  # a library tells it in words
        (lambda: Path("/dev/full").write_text("text"), CacheFull),
    ],
)
def test_a_build_that_fails_leaves_nothing_and_a_full_disk_is_told_as_such(
    tmp_path: Path, last_act: Callable[[], object], error: type[Exception]
) -> None:
    def build(folder: Path) -> None:
        write_one_file(folder)
        last_act()

    with pytest.raises(error):
        build_once(tmp_path / "m", build, 0)
    assert visible(tmp_path) == []


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("in the way")
    with pytest.raises(CacheUnusable, match=r"cannot write into the cache .*/models.*: .*MARLAAS_CACHE"):
        build_once(tmp_path / "models" / "m", never, 0)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MARLAAS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "marlaas"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "marlaas"
    monkeypatch.setenv("MARLAAS_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"
