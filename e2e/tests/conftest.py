"""One installation of the chart for all scenarios; the files run in the order of their names, and the last one uninstalls it.

A file's `begin` returns the objects that its scenarios are about. They are applied at the start, those of all files together, so that the
cluster works on them while scenarios of earlier files are checked.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from marlaas_e2e.fixtures import cluster
from marlaas_e2e.handle import ClusterHandle
from marlaas_e2e.platform import NAMESPACE, Platform, model_cache, platform_archives, tenant

__all__ = ["cluster"]

_STAGES: pytest.StashKey[dict[str, float]] = pytest.StashKey()


@pytest.fixture(scope="session")
def platform(cluster: ClusterHandle, request: pytest.FixtureRequest) -> Platform:
    """The chart, installed, with everything applied that the collected files begin with."""
    made = Platform(cluster)
    stages = request.config.stash.setdefault(_STAGES, {})
    with _timed(stages, "images in the node"):
        for archive in platform_archives():
            cluster.import_image(archive)
    made.apply(*tenant(NAMESPACE), *model_cache())
    with _timed(stages, "helm install --wait"):
        made.install()
    begins = dict.fromkeys(getattr(item.getparent(pytest.Module).obj, "begin", None) for item in request.session.items)  # type: ignore[union-attr]
    made.apply(*(body for begin in begins if begin is not None for body in begin(made)))
    return made


@contextmanager
def _timed(stages: dict[str, float], name: str) -> Iterator[None]:
    begun = time.monotonic()
    yield
    stages[name] = time.monotonic() - begun


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Waits have their own time limits."""
    for item in items:
        item.add_marker(pytest.mark.timeout(3600))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How long each stage took, for the notes."""
    for name, took in config.stash.get(_STAGES, {}).items():
        terminalreporter.write_line(f"stage: {name}: {took:.0f} s")
