"""The API server of the tests leaves nothing behind."""

import subprocess
import sys
from pathlib import Path

from marlaas_e2e.node import host

_STARTS_ONE = """
import time
from marlaas_e2e.control_plane import ControlPlane
plane = ControlPlane()
plane.start()
print(plane.etcd.pid, plane.apiserver.pid, plane.folder, flush=True)
time.sleep(600)
"""


def test_nothing_survives_a_test_run_that_is_killed():
    run = subprocess.Popen([sys.executable, "-c", _STARTS_ONE], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    etcd, apiserver, folder = run.stdout.readline().split()
    run.kill()
    run.communicate()
    for pid in (etcd, apiserver):
        subprocess.run(["tail", f"--pid={pid}", "-f", "/dev/null"], timeout=30, check=True)  # waits for its end
        assert host.birth_of(int(pid)) is None
    for left in sorted(Path(folder).rglob("*"), reverse=True):
        left.rmdir() if left.is_dir() else left.unlink()
    Path(folder).rmdir()
