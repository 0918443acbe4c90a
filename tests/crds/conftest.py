"""A real API server that has the committed CustomResourceDefinitions."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.crds.client import Api

from marlaas_e2e.control_plane import ControlPlane
from marlaas_e2e.fixtures import control_plane

__all__ = ["control_plane"]
CRDS = Path(__file__).parents[2] / "crds"


@pytest.fixture(scope="session")
def plane(control_plane: ControlPlane) -> ControlPlane:
    """The API server, once it serves the kinds."""
    control_plane.kubectl("apply", "-f", CRDS)
    control_plane.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", CRDS)
    return control_plane


@pytest.fixture(scope="session")
def api(plane: ControlPlane) -> Iterator[Api]:
    """The API server over HTTP, as its administrator."""
    with Api(plane) as connected:
        yield connected
