"""Killing containers: skipped by name where that cannot be done, and never without effect."""

import subprocess
import sys
from pathlib import Path
from unittest import SkipTest

import pytest

from marlaas_e2e.handle import ClusterHandle


def test_killing_a_container_of_somebody_elses_cluster_skips_the_scenario() -> None:
    with pytest.raises(SkipTest, match="only seen on the node of this machine"):
        ClusterHandle(Path("kubeconfig"), "kind-kind").kill_container("team-a", "pod", "container")


def test_a_kill_that_hits_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    monkeypatch.setattr(ClusterHandle, "container_pid", lambda *_: ended.pid)
    with pytest.raises(LookupError, match="team-a/pod: container ended by itself"):
        ClusterHandle(Path("kubeconfig"), "ours").kill_container("team-a", "pod", "container")
