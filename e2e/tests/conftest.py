"""One installation of the chart for all scenarios; the files run in the order of their names, and the last one uninstalls it.

A file's `begin` returns the objects that its scenarios are about. They are applied before the files before it have been checked, so that
the cluster works on them in the meantime.
"""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from marlaas_e2e.fixtures import cluster
from marlaas_e2e.handle import ClusterHandle
from marlaas_e2e.platform import NAMESPACE, Platform, model_cache, platform_archives, tenant
from tests import guard

__all__ = ["cluster"]

AHEAD = 3
"""Files whose objects are applied before the files before them have been checked."""
_STAGES: pytest.StashKey[dict[str, float]] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    """Run a scenario that fails by chance once more, on the same cluster."""
    guard.register(config)


@pytest.fixture(scope="session")
def platform(cluster: ClusterHandle, files: Iterator[ModuleType], request: pytest.FixtureRequest) -> Platform:
    made = Platform(cluster)
    stages = request.config.stash.setdefault(_STAGES, {})
    with _timed(stages, "images in the node"):
        for archive in platform_archives():
            cluster.import_image(archive)
    made.apply(*tenant(NAMESPACE), *model_cache())
    with _timed(stages, "helm install --wait"):
        made.install()
    begin_next(made, files, AHEAD)
    return made


@pytest.fixture(scope="session")
def files(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    parents = [item.getparent(pytest.Module) for item in request.session.items]
    return iter(dict.fromkeys(parent.obj for parent in parents if parent is not None))


@pytest.fixture(scope="module", autouse=True)
def begun(platform: Platform, files: Iterator[ModuleType]) -> None:
    """Apply what one more file begins with. Not all at once: too many pods that start together delay each other's probes."""
    begin_next(platform, files, 1)


def begin_next(platform: Platform, files: Iterator[ModuleType], num: int) -> None:
    bodies = [body for file in itertools.islice(files, num) if hasattr(file, "begin") for body in file.begin(platform)]
    if bodies:
        platform.apply(*bodies)


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
