"""A real kube-apiserver with etcd, and our kinds in it, for every test of the operator that asks for one."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from marlaas_e2e.control_plane import ControlPlane
from marlaas_e2e.fixtures import control_plane
from marlaas_operator.cluster import NotFound
from marlaas_operator.cluster.api_server import connect
from marlaas_operator.cluster.resources import KINDS

__all__ = ["control_plane"]

CRDS = Path(__file__).parents[2] / "crds"


@pytest.fixture(scope="session")
def crds(control_plane: ControlPlane) -> ControlPlane:
    """The control plane, with our kinds served."""
    with ThreadPoolExecutor(1) as aside:  # an async fixture may be what asks: its loop runs in this thread
        aside.submit(lambda: asyncio.run(install_kinds(control_plane))).result()
    return control_plane


async def install_kinds(plane: ControlPlane) -> None:
    gateway = await connect(plane.kubeconfig)
    try:
        for file in sorted(CRDS.glob("*.yaml")):
            await gateway.apply(yaml.safe_load(file.read_text()))
        async with asyncio.timeout(60):
            for resource in KINDS:
                while not await served(gateway.list(resource)):  # noqa: ASYNC110 - a real server
                    await asyncio.sleep(0.1)
    finally:
        await gateway.close()


async def served(listing: object) -> bool:
    try:
        await listing  # type: ignore[misc]
    except NotFound:
        return False
    return True
