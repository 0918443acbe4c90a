"""This machine: whether a node can run here, its processes and containers, and the room on its disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from marlaas_e2e.__main__ import UNABLE, main
from marlaas_e2e.handle import ClusterHandle
from marlaas_e2e.worker_image import NoRoom, require_room


def test_without_root_it_says_so_and_somebody_elses_cluster_needs_no_rights_here(monkeypatch, capsys):
    monkeypatch.delenv("E2E_CONTEXT", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["able"]) == UNABLE
    assert "root" in capsys.readouterr().out
    monkeypatch.setenv("E2E_CONTEXT", "kind-kind")
    assert main(["able"]) == 0


def test_a_kill_that_hits_nothing_is_an_error(monkeypatch):
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    monkeypatch.setattr(ClusterHandle, "container_pid", lambda *_: ended.pid)
    with pytest.raises(LookupError, match="team-a/pod: container ended by itself"):
        ClusterHandle(Path("kubeconfig"), "ours").kill_container("team-a", "pod", "container")


def test_a_disk_without_room_for_the_worker_image_is_told_before_the_build(tmp_path):
    require_room(tmp_path / "cache", 0.0)
    with pytest.raises(NoRoom, match=r"takes 1000000000 GB of disk .*make room, or set MARLAAS_CACHE"):
        require_room(tmp_path / "cache", 1e9)
