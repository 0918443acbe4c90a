"""pytest fixtures: `pytest_plugins = ["marlaas_e2e.fixtures"]` in the root conftest, or import the names."""

import os
from pathlib import Path

import pytest

from marlaas_e2e.elsewhere import Elsewhere
from marlaas_e2e.handle import ClusterHandle
from marlaas_e2e.node.layout import Layout


@pytest.fixture(scope="session")
def cluster() -> ClusterHandle:
    """A cluster with a node: that of E2E_CONTEXT, or the one that this process runs inside (`make e2e`)."""
    if context := Elsewhere.said().context:
        kubeconfig = os.environ.get("KUBECONFIG", str(Path.home() / ".kube" / "config"))
        if os.pathsep in kubeconfig:
            raise pytest.UsageError("KUBECONFIG names several files; make one: kubectl config view --flatten > FILE")
        return ClusterHandle(Path(kubeconfig), context)
    root = os.environ.get("MARLAAS_E2E_ROOT")
    if root is None:
        pytest.skip("no cluster: run this by `make e2e`, or `python -m marlaas_e2e run pytest ...`, or set E2E_CONTEXT")
    layout = Layout(Path(root))
    return ClusterHandle(layout.kubeconfig, "e2e", layout)
