"""What only this machine's node can do is skipped elsewhere, by name."""

from pathlib import Path
from unittest import SkipTest

import pytest

from marlaas_e2e.handle import ClusterHandle


def test_killing_a_container_of_somebody_elses_cluster_skips_the_scenario() -> None:
    with pytest.raises(SkipTest, match="only seen on the node of this machine"):
        ClusterHandle(Path("kubeconfig"), "kind-kind").kill_container("team-a", "pod", "container")
