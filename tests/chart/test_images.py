"""What goes into the images: exactly the sources that .dockerignore lets through, and no more packages than are imported."""

import ast
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from .conftest import ROOT

IMAGES = sorted((ROOT / "images").glob("*.Dockerfile"))
CONTEXT_COPY = re.compile(r"^COPY (?!--from)(\S+) ", re.MULTILINE)
PACKAGES = ("marlaas_api", "marlaas_operator")
NOT_IN_THE_OPERATOR = {"obstore"}
"""The blob gateway is a file that the operator never imports: it knows blobs by their urls."""


def imported(*files: Path) -> set[str]:
    """Names of the packages that files import, also inside of functions."""
    names: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - set(PACKAGES)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required(file: Path) -> set[str]:
    lines = [line.strip() for line in file.read_text().splitlines()]
    return {normal(re.split(r"[^A-Za-z0-9._-]", line)[0]) for line in lines if line and not line.startswith(("#", "-"))}


def test_the_operators_lock_has_every_package_that_it_imports_and_none_that_it_does_not():
    sources = (file for package in PACKAGES for file in (ROOT / "operator" / package).rglob("*.py"))
    modules = imported(*sources) - NOT_IN_THE_OPERATOR
    distributions = packages_distributions()
    used = {normal(distributions[module][0]) for module in modules} - {"pydantic-core"}
    assert required(ROOT / "locks" / "operator.in") == used


def pins(file: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", file.read_text(), re.MULTILINE):
        found.setdefault(normal(name), set()).add(version)
    return found


def test_the_operators_lock_has_the_versions_that_everything_is_tested_with():
    tested, shipped = pins(ROOT / "locks" / "cpu.txt"), pins(ROOT / "locks" / "operator.txt")
    assert {name: versions for name, versions in shipped.items() if not versions <= tested.get(name, set())} == {}


@pytest.mark.parametrize("dockerfile", IMAGES, ids=lambda path: path.name)
def test_an_image_copies_only_what_is_there_and_is_let_through(dockerfile):
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for source in CONTEXT_COPY.findall(dockerfile.read_text()):
        path = source.replace("${ACCEL}", "cpu")
        assert (ROOT / path).exists()
        assert any(Path(path).match(pattern) or pattern.startswith(f"{path}/") for pattern in allowed), source


@pytest.mark.parametrize("dockerfile", IMAGES, ids=lambda path: path.name)
def test_an_image_runs_as_nobody_in_particular_from_any_base(dockerfile):
    text = dockerfile.read_text()
    assert re.search(r"^ARG BASE=\S+$", text, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE}"}
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE) == ["10001:10001"]
