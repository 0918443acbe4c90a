"""The content of the operator's image: no fakes, no generators, and every package that its programs import."""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from tests.chart.test_images import imported, normal

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "images/operator.Dockerfile").read_text()
PROGRAMS = ("marlaas_operator.__main__", "marlaas_operator.installed", "marlaas_operator.uninstall")
GENERATORS = {path.name for path in (ROOT / "tools").glob("*.py")} - {"__init__.py"}
LIST_MODULES = f"""
import sys, {", ".join(PROGRAMS)}
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] in ("marlaas_api", "marlaas_operator"):
        print(module.__file__)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Our packages as in the image: those that the Dockerfile copies, less those that it removes."""
    for package in re.findall(r"^COPY operator/(\w+) ", DOCKERFILE, re.MULTILINE):
        shutil.copytree(ROOT / "operator" / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    (removed,) = re.findall(r"rm -r ([^\n\\]+)", DOCKERFILE)
    for name in removed.split():
        path = tmp_path / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return tmp_path


def test_the_image_holds_neither_fakes_nor_generators_and_its_programs_need_nothing_outside_of_the_lock(
    site: Path,
) -> None:
    names = {path.name for path in site.rglob("*.py")} | {path.name for path in site.rglob("*") if path.is_dir()}
    assert {"marlaas_api", "marlaas_operator", "bus_nats", "api_server.py"} <= names
    assert {name for name in names if "memory" in name} == set()
    assert names & GENERATORS == set()
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-W", "ignore", "-c", LIST_MODULES]
    listed = subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True, check=True)
    files = [Path(line) for line in listed.stdout.splitlines()]
    assert all(file.is_relative_to(site) for file in files)
    packages = imported(*files)
    distributions = packages_distributions()
    needed = {normal(distributions[name][0]) for name in packages}
    locked = {normal(name) for name in re.findall(r"(?m)^([\w.-]+)==", (ROOT / "locks/operator.txt").read_text())}
    assert {"aiohttp", "kopf", "prometheus-client"} <= needed
    assert needed <= locked
