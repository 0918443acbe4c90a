"""A home and a name for processes that have none, and no change where there are."""

import getpass
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from marlaas_worker.process_setup import make_home

# Imports first: the interpreter may lie where that user may not read.
NAMELESS = """
import getpass, os, pwd, sys
from pathlib import Path
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from marlaas_worker.process_setup import make_home
os.setgroups([]); os.setresgid(10001, 10001, 10001); os.setresuid(10001, 10001, 10001)
make_home(Path(sys.argv[1]))
print(os.environ["HOME"], getpass.getuser(), default_cache_dir())
"""


def test_without_a_home_there_is_one_below_scratch_and_otherwise_nothing_is_touched(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    before = dict(os.environ)
    make_home(tmp_path / "scratch")
    assert dict(os.environ) == before
    assert not (tmp_path / "scratch").exists()
    monkeypatch.setenv("HOME", str(tmp_path / "gone"))
    monkeypatch.setenv("USER", "somebody")
    make_home(tmp_path / "scratch")
    assert Path.home() == tmp_path / "scratch" / "home"
    assert Path.home().is_dir()
    assert getpass.getuser() == os.environ.get("LOGNAME", "somebody")


@pytest.mark.processes
@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become a user that no password file knows")
def test_a_user_that_nobody_knows_can_use_torchs_compiler():
    with tempfile.TemporaryDirectory() as scratch:
        os.chown(scratch, 10001, 10001)
        done = subprocess.run(
            [sys.executable, "-c", NAMELESS, scratch],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(filter(None, sys.path)), "TMPDIR": scratch},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    home, name, cache = done.stdout.split()
    assert (home, name) == (f"{scratch}/home", "marlaas")
    assert cache.startswith(scratch)
