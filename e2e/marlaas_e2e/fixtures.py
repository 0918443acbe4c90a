"""pytest fixtures: `pytest_plugins = ["marlaas_e2e.fixtures"]` in the root conftest, or import the names."""

from collections.abc import Iterator

import pytest

from marlaas_e2e.control_plane import ControlPlane


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A real API server for the whole session; tests keep apart by names and namespaces of their own."""
    with ControlPlane() as plane:
        yield plane


@pytest.fixture(scope="session")
def control_plane_with_controllers() -> Iterator[ControlPlane]:
    """One more, with kube-controller-manager: owned objects are collected, namespaces end."""
    with ControlPlane(controllers=True) as plane:
        yield plane
