"""One installation of the chart for all scenarios; the files run in the order of their names, and the last one uninstalls it."""

import time
from typing import Any

import pytest

from marlaas_e2e.fixtures import cluster
from marlaas_e2e.handle import ClusterHandle
from marlaas_e2e.platform import NAMESPACE, Platform, model_cache, platform_images

__all__ = ["cluster"]

_STAGES: pytest.StashKey[dict[str, float]] = pytest.StashKey()


@pytest.fixture(scope="session")
def platform(cluster: ClusterHandle, request: pytest.FixtureRequest) -> Platform:
    """The chart, installed."""
    made = Platform(cluster)
    request.config.stash[_STAGES] = made.stages
    begun = time.monotonic()
    for archive in platform_images():
        cluster.import_image(archive)
    made.stages["images in the node"] = time.monotonic() - begun
    made.tenant(NAMESPACE)
    if volumes := model_cache():
        made.apply(*volumes)
    begun = time.monotonic()
    made.install()
    made.stages["helm install --wait"] = time.monotonic() - begun
    return made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A scenario waits for real training: what waits says itself how long."""
    for item in items:
        item.add_marker(pytest.mark.timeout(3600))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How long each stage took, for the notes."""
    for name, took in config.stash.get(_STAGES, {}).items():
        terminalreporter.write_line(f"stage: {name}: {took:.0f} s")
