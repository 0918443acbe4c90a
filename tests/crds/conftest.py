"""A real API server that serves the committed CustomResourceDefinitions, over HTTP."""

from collections.abc import Iterator

import pytest
from tests.crds.client import Api

from marlaas_e2e.control_plane import ControlPlane


@pytest.fixture(scope="session")
def plane(control_plane: ControlPlane) -> ControlPlane:
    """The API server without objects of our kinds: other tests share it."""
    control_plane.kubectl("delete", "rljobs,modelpools,tenants", "--all", "--all-namespaces")
    return control_plane


@pytest.fixture(scope="session")
def api(plane: ControlPlane) -> Iterator[Api]:
    """The API server over HTTP, as its administrator."""
    with Api(plane) as connected:
        yield connected
