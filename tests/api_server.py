"""A real API server for tests: Kubernetes' own programs, and one server in each pytest process that all tests there share.

Tests keep apart by names and namespaces, and clean up. `control_plane_with_controllers` is a second server: controllers make pods
and collect garbage, which tests of the operator play themselves.
"""

import contextlib
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from marlaas_e2e import binaries
from marlaas_e2e.binaries import CannotBuild
from marlaas_e2e.control_plane import ControlPlane
from marlaas_e2e.kubectl import CommandFailed

_TESTS = Path(__file__).parent
CRDS = _TESTS.parent / "crds"
FOLDERS = ("operator/real", "operator/cluster", "operator/manifests", "chart", "crds", "cluster_cli", "e2e_tools")
"""Folders whose tests run in one pytest process, so that they share its servers, which end after the last of these tests."""
SERVERS = ("control_plane", "control_plane_with_controllers")
_PROGRAMS = {
    "control_plane": ("etcd", "kube-apiserver", "kubectl"),
    "control_plane_with_controllers": ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl"),
    "helm": ("helm",),
}
"""Programs that a fixture needs."""
_started: list[ControlPlane] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use a server. Raises pytest.UsageError for one outside FOLDERS."""
    for item in items:
        if not set(SERVERS).isdisjoint(getattr(item, "fixturenames", ())):
            if not _is_of_server(item):
                raise pytest.UsageError(f"{item.nodeid} uses an API server: add its folder to api_server.FOLDERS")
            item.add_marker(pytest.mark.api_server)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Build missing programs, or wait until another process has built them, before the clock of the test's timeout starts.

    Stop the servers after the last test that may use them: idle ones take 7 % of a core.
    """
    fixtures = [
        *getattr(item, "fixturenames", ()),
        *(["control_plane"] if item.get_closest_marker("api_server") else []),
    ]
    names = {name for fixture in fixtures for name in _PROGRAMS.get(fixture, ())}
    with contextlib.suppress(CannotBuild):  # the fixture says it
        binaries.ensure(sorted(names))
    result = yield
    if _is_of_server(item) and nextitem is not None and not _is_of_server(nextitem):
        later = item.session.items[item.session.items.index(item) + 1 :]
        if not any(map(_is_of_server, later)):  # `--ff` mixes the folders
            for plane in _started:
                plane.stop()
    return result


def _is_of_server(item: pytest.Item) -> bool:
    return item.path.parent.relative_to(_TESTS).as_posix() in FOLDERS


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A server without controllers that serves our kinds."""
    with ControlPlane() as plane:
        _started.append(plane)
        serve_kinds(plane)
        yield plane


@pytest.fixture(scope="session")
def control_plane_with_controllers() -> Iterator[ControlPlane]:
    """A server with kube-controller-manager: owned objects are collected, namespaces end. It does not serve our kinds."""
    with ControlPlane(controllers=True) as plane:
        _started.append(plane)
        yield plane


def serve_kinds(plane: ControlPlane) -> None:
    """Install the committed kinds; return once the server serves them, which is a moment after they are established."""
    plane.kubectl("apply", "--server-side", "--force-conflicts", "--filename", CRDS)
    plane.kubectl("wait", "--for=condition=Established", "--timeout=60s", "--filename", CRDS)
    until = time.monotonic() + 60
    while True:
        try:
            plane.kubectl("get", "rljobs,modelpools,tenants", "--all-namespaces")
            return
        except CommandFailed:
            assert time.monotonic() < until, "the kinds are established and not served"
