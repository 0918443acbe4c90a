"""Seconds of the operator's thread for one round with many jobs and Tenants: observe and plan, without requests.

A round is one job of each Tenant that begins to run, and a plan of every object that these changes queue. The first round plans every
object once, as after a restart.
"""

import asyncio
import time
from collections.abc import Iterable

from tests.operator import objects

from marlaas_api.bus import Bus
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.bus_users import BusKeys, CredentialIssuer
from marlaas_operator.cluster import Body, Target
from marlaas_operator.cluster.memory import MemoryCluster
from marlaas_operator.cluster.resources import KINDS
from marlaas_operator.service import ExternalSystems, Service
from marlaas_operator.snapshot import BusState

_NOW = 1.8e9


def round_seconds(num_jobs: int, num_tenants: int) -> tuple[float, float]:
    """Return the seconds of the first and of a later round."""
    return asyncio.run(_rounds(num_jobs, num_tenants))


async def _rounds(num_jobs: int, num_tenants: int) -> tuple[float, float]:
    service = Service(_fakes(), objects.installation())
    service.health.state = BusState(available=True, since=0.0, synced=True)
    for number in range(num_tenants):
        service.cache.see(_stored(objects.tenant(f"tenant-{number}", f"team-{number}"), number))
    service.cache.see(_stored(objects.pool("tiny"), num_tenants))
    jobs = [
        _stored(objects.job(f"team-{number % num_tenants}", f"job-{number}", "tiny"), 1000 + number)
        for number in range(num_jobs)
    ]
    for body in jobs:
        service.cache.see(body)
    first_s = _planned_s(service, {target for kind in KINDS for target in service.cache.targets(kind)})
    queued: set[Target] = set()
    service.cache.enqueue = lambda target, delay_s: queued.add(target)
    began = time.perf_counter()
    for version, body in enumerate(jobs[:num_tenants], 10**6):
        metadata = {**body["metadata"], "resourceVersion": str(version)}
        service.cache.see({**body, "metadata": metadata, "status": {"phase": "Running"}})
    return first_s, time.perf_counter() - began + _planned_s(service, queued)


def _planned_s(service: Service, targets: Iterable[Target]) -> float:
    began = time.perf_counter()
    for target in targets:
        assert service._reconciler._plan(target) is not None
    return time.perf_counter() - began


def _stored(body: Body, version: int) -> Body:
    return {**body, "metadata": {**body["metadata"], "uid": f"u{version}", "resourceVersion": str(version)}}


def _fakes() -> ExternalSystems:
    async def open_bus() -> Bus:
        return MemoryServer().connect("operator")

    async def watch(*_: object) -> None: ...

    issuer = CredentialIssuer(BusKeys.make(), lambda: _NOW)
    return ExternalSystems(MemoryCluster(objects.SYSTEM), open_bus, watch, issuer, now=lambda: _NOW)
