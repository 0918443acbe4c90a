"""Jobs by the thousand for `bench.operator_scale`, the real orchestrator beside them, and when everything is steady."""

import asyncio
import itertools
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.operator.real.orchestrators import ScriptedOrchestrator
from tests.operator.real.rig import Rig, eventually, job, namespace, pool

from marlaas_api.bus_users import OrchestratorUser, mint
from marlaas_e2e.processes import Daemon
from marlaas_operator.cluster import Target
from marlaas_operator.cluster.resources import RLJOBS

QUIET_S = 1.0
_CREATORS = 8
_PATIENCE_S = 300.0
_POLL_S = 0.02


class Orchestrator:
    """`python -m marlaas_worker orchestrator` with its own credentials."""

    def __init__(self, rig: Rig) -> None:
        creds = rig.folder / "real-orchestrator.creds"
        creds.write_text(mint(rig.keys, OrchestratorUser(), time.time()))
        command: list[str] = [
            *(sys.executable, "-m", "marlaas_worker", "orchestrator"),
            *("--nats", rig.nats.url, "--blobs", f"file://{rig.folder}/blobs", "--name", "orchestrator-0"),
            *("--scratch", str(rig.folder / "scratch"), "--creds", str(creds)),
        ]
        self._daemon = Daemon("orchestrator", command, rig.folder / "orchestrator.log")

    def start(self) -> None:
        self._daemon.start()

    def kill(self) -> None:
        self._daemon.kill()


class Load:
    """So many jobs over so many namespaces, all of one pool that has no engine."""

    def __init__(self, rig: Rig, num_jobs: int, num_namespaces: int) -> None:
        self._rig = rig
        self._names = [(f"team-{number % num_namespaces}", f"job-{number}") for number in range(num_jobs)]

    async def prepare(self) -> None:
        for name in sorted({place for place, _ in self._names}):
            await self._rig.gateway.apply(namespace(name))
        await self._rig.gateway.apply(pool("tiny"))

    async def ready(self) -> None:
        async def look() -> bool:
            return self._rig.endpoints("/readyz") == "ok\n"

        await eventually(self._rig, "ready", look, _PATIENCE_S, 0.05)

    async def create(self) -> float:
        """Create every job; seconds that it took."""
        began = time.monotonic()
        left = iter(self._names)

        async def some() -> None:
            for place, name in left:
                await self._rig.gateway.create(job(place, name, "tiny"))

        await asyncio.gather(*(some() for _ in range(_CREATORS)))
        return time.monotonic() - began

    async def steady(self) -> float:
        """When the last status was written; returns once all jobs have theirs and nothing more has come for a second."""
        at = await self._quiet(
            lambda: self._rig.metric("marlaas_operator_api_requests_total", verb="PATCH", resource="rljobs/status"),
            len(self._names),
        )
        bodies = await self._rig.gateway.list(RLJOBS)
        reasons = {str((body.get("status") or {}).get("reason")) for body in bodies}
        assert reasons == {"WaitingForPool"}, reasons
        return at

    async def idle(self) -> float:
        """When a new operator had looked at every job once."""
        return await self._quiet(
            lambda: self._rig.metric("marlaas_operator_reconciles_total", kind="RLJob", outcome="ok"), len(self._names)
        )

    async def latency(self, number: int) -> list[list[object]]:
        """Report progress of one job after the other, and time until a GET shows it."""
        bus = await self._rig.connect_orchestrator()
        says = ScriptedOrchestrator(bus)
        drawn = random.Random(0).sample(self._names, min(number, len(self._names)))
        times = [
            await self._one(says, *name, step) for name, step in zip(drawn, itertools.cycle((1, 2, 3)), strict=False)
        ]
        await bus.close()
        parts = ((50, ""), (99, "≤ 3 s"))
        rows: list[list[object]] = [
            [
                f"progress on the bus → in a GET, p{part}",
                f"{percentile(times, part) * 1000:.0f} ms",
                must,
                "≤ 1 s" if must else "",
            ]
            for part, must in parts
        ]
        return rows

    async def _one(self, says: ScriptedOrchestrator, place: str, name: str, step: int) -> float:
        began = time.monotonic()
        await says.say(place, name, phase="Queued", admitted=False, reason="WaitingForPool", message="waits", step=step)

        async def look() -> Any:
            body = await self._rig.gateway.get(Target(RLJOBS, place, name))
            return body["status"].get("step") == step

        await eventually(self._rig, "progress shows", look, 30.0, _POLL_S)
        return time.monotonic() - began

    async def _quiet(self, count: Callable[[], float], at_least: int) -> float:
        """When `count` last moved, once it is large enough and has rested."""
        seen, moved_at = -1.0, time.monotonic()
        deadline = moved_at + _PATIENCE_S
        while True:
            now, value = time.monotonic(), count()
            if value != seen:
                seen, moved_at = value, now
            if value >= at_least and now - moved_at >= QUIET_S:
                return moved_at
            assert now < deadline, f"{value:.0f} of {at_least} after {_PATIENCE_S:.0f} s\n{self._rig.words()}"
            await asyncio.sleep(0.1)


def percentile(values: list[float], part: int) -> float:
    """The smallest value that so many percent of the values do not exceed."""
    return sorted(values)[max(0, -(-len(values) * part // 100) - 1)]
