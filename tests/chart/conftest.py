"""The chart, rendered by the real helm."""

import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from marlaas_e2e import binaries

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "marlaas"
VALUES = Path(__file__).parent / "values"
"""Sets of values that a real platform team might have; each has a golden file."""

Document = dict[str, Any]
Render = Callable[..., list[Document]]
Helm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def helm() -> Helm:
    """The real helm; built into the user's cache on the first use (minutes on a new machine)."""
    program = binaries.ensure(["helm"])["helm"]

    def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120)

    return call


@pytest.fixture(scope="session")
def render(helm: Helm) -> Render:
    """What the chart makes of a set of values, hooks included; without the CustomResourceDefinitions unless asked. Not to be changed."""

    @cache
    def rendered(values: str, *options: str, crds: bool = False) -> list[Document]:
        install = f"crds.install={str(crds).lower()}"
        files = ["--values", VALUES / f"{values}.yaml"]
        done = helm("template", "marlaas", CHART, "--namespace", "marlaas-system", *files, "--set", install, *options)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    return rendered


def value_sets() -> list[str]:
    return sorted(path.stem for path in VALUES.glob("*.yaml"))


@pytest.fixture(params=value_sets())
def documents(request: pytest.FixtureRequest, render: Render) -> list[Document]:
    """Every object, once for each set of values."""
    return render(request.param)
