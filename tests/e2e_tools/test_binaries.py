"""Building programs into the cache: once, atomically, with a sentence when it cannot be."""

import threading
from pathlib import Path

import pytest

from marlaas_e2e import binaries
from marlaas_e2e.binaries import CannotBuild

_WRITES_ITS_TARGET = """#!/bin/sh
echo built >> {count}
while [ "$1" != -o ]; do shift; done
printf program > "$2"
"""
_FAILS = "#!/bin/sh\necho 'module is not offered' >&2\nexit 1\n"


@pytest.fixture
def count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own and a toolchain that writes down how often it was called."""
    count = tmp_path / "count"
    monkeypatch.setenv("MARLAAS_CACHE", str(tmp_path / "cache"))
    toolchain(tmp_path, monkeypatch, _WRITES_ITS_TARGET.format(count=count))
    return count


def toolchain(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    go = folder / "bin" / "go"
    go.parent.mkdir(exist_ok=True)
    go.write_text(script)
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{go.parent}:/usr/bin:/bin")


def test_a_program_is_built_once_and_kept_however_many_want_it(count):
    builders = [threading.Thread(target=binaries.ensure, args=(["etcd", "pause"],)) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert binaries.ensure(["pause"])["pause"] == binaries.path("pause")
    assert binaries.path("pause").read_text() == "program"
    assert count.read_text() == "built\nbuilt\n"


def test_a_failed_build_says_why_and_leaves_nothing_that_looks_built(count, tmp_path, monkeypatch):
    toolchain(tmp_path, monkeypatch, _FAILS)
    with pytest.raises(CannotBuild, match=r"etcd cannot be built in e2e/tools/etcd:\nmodule is not offered"):
        binaries.ensure(["etcd"])
    assert list(binaries.path("etcd").parent.iterdir()) == []


def test_without_a_toolchain_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("MARLAAS_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(CannotBuild, match="install Go"):
        binaries.ensure(["pause"])
