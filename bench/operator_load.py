"""Thousands of jobs for `bench.operator_scale`, a real orchestrator beside them, and detection of the steady state."""

import asyncio
import itertools
import json
import random
import sys
import time
import urllib.request
import uuid
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any

from tests.operator.objects import job, namespace, pool
from tests.operator.real.harness import OperatorHarness, eventually
from tests.operator.real.orchestrators import ScriptedOrchestrator

from marlaas_api.bus_users import OrchestratorUser, mint
from marlaas_api.kinds.sizes import MAX_ARGS_BYTES, MAX_OBJECT_BYTES, MAX_SPEC_BYTES
from marlaas_api.subjects import PROGRESS
from marlaas_e2e.processes import Daemon
from marlaas_operator.cluster import Target
from marlaas_operator.cluster.resources import RLJOBS

QUIET_S = 1.0
_CREATORS = 8
_PATIENCE_S = 900.0
_POLL_S = 0.02


class Orchestrator:
    """`python -m marlaas_worker orchestrator` with its own credentials."""

    def __init__(self, harness: OperatorHarness) -> None:
        creds = harness.folder / "real-orchestrator.creds"
        creds.write_text(mint(harness.keys, OrchestratorUser(), time.time()))
        command: list[str] = [
            *(sys.executable, "-m", "marlaas_worker", "orchestrator"),
            *("--nats", harness.nats.url, "--blobs", f"file://{harness.folder}/blobs", "--name", "orchestrator-0"),
            *("--scratch", str(harness.folder / "scratch"), "--creds", str(creds)),
        ]
        self._daemon = Daemon("orchestrator", command, harness.folder / "orchestrator.log")

    def start(self) -> None:
        self._daemon.start()

    def kill(self) -> None:
        self._daemon.kill()

    @property
    def pid(self) -> int:
        return self._daemon.pid


def largest(namespace: str, name: str) -> dict[str, Any]:
    """Return a job of the largest allowed size, with texts that compress badly: arguments, other fields and an annotation."""
    draw = random.Random(f"{namespace}/{name}")

    def text(size: int) -> str:
        return b64encode(draw.randbytes(size)).decode()[:size]

    image = {"image": "x", "entrypoint": [text(4000) for _ in range(7)], "args": {"text": text(MAX_ARGS_BYTES - 100)}}
    body = job(namespace, name, "tiny", environment=image)
    body["metadata"]["annotations"] = {"note": text(MAX_OBJECT_BYTES - MAX_SPEC_BYTES - 4096)}
    return body


class Load:
    """A number of jobs spread over namespaces, all on one pool without an engine. large: of the largest allowed size."""

    def __init__(self, harness: OperatorHarness, num_jobs: int, num_namespaces: int, large: bool = False) -> None:
        self._harness = harness
        self._body = largest if large else lambda place, name: job(place, name, "tiny")
        self._names = [(f"team-{number % num_namespaces}", f"job-{number}") for number in range(num_jobs)]

    async def prepare(self) -> None:
        for name in sorted({place for place, _ in self._names}):
            await self._harness.gateway.apply(namespace(name))
        await self._harness.gateway.apply(pool("tiny"))

    async def ready(self) -> None:
        async def look() -> bool:
            return self._harness.endpoints("/readyz") == "ok\n"

        await eventually(self._harness, "ready", look, _PATIENCE_S, 0.05)

    async def create(self) -> float:
        """Create every job; return the seconds taken."""
        began = time.monotonic()
        left = iter(self._names)

        async def some() -> None:
            for place, name in left:
                await self._harness.gateway.create(self._body(place, name))

        await asyncio.gather(*(some() for _ in range(_CREATORS)))
        return time.monotonic() - began

    async def steady(self) -> float:
        """Return the time of the last status write, after all jobs have a status and nothing was written for a second."""
        at = await self._quiet(
            lambda: self._harness.metric("marlaas_operator_api_requests_total", verb="PATCH", resource="rljobs/status"),
            len(self._names),
        )
        bodies = await self._harness.gateway.list(RLJOBS)
        reasons = {str((body.get("status") or {}).get("reason")) for body in bodies}
        assert reasons == {"WaitingForPool"}, reasons
        return at

    async def seed(self) -> None:
        """Create the first job, and once it waits for its pool, write the others into etcd as the API server stored that one.

        The API server would take a quarter of an hour to create them.
        """
        names, self._names = self._names, self._names[:1]
        await self.create()
        await self.queued()
        await self.idle()
        self._names = names
        [first] = self._etcd("range", key=_stored_at(*names[0]))["kvs"]
        for place, name in names[1:]:
            stored = json.loads(b64decode(first["value"]))
            body = self._body(place, name)
            stored["metadata"] |= {**body["metadata"], "uid": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{place}/{name}"))}
            stored["spec"]["environment"] |= body["spec"]["environment"]
            value = b64encode(json.dumps(stored).encode()).decode()
            await asyncio.to_thread(self._etcd, "put", key=_stored_at(place, name), value=value)

    def _etcd(self, call: str, **fields: str) -> Any:
        port = self._harness.plane.etcd_port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v3/kv/{call}", json.dumps(fields).encode()) as answer:
            return json.load(answer)

    async def queued(self) -> None:
        """Wait until the orchestrator has written the progress of every job."""
        bus = await self._harness.connect_orchestrator()
        progress = await bus.bucket(PROGRESS)

        async def look() -> bool:
            return len(await progress.entries()) == len(self._names)

        await eventually(self._harness, "every job queued", look, _PATIENCE_S, 1.0)
        await bus.close()

    async def idle(self) -> float:
        """Return the time at which a new operator had processed every job once."""
        return await self._quiet(
            lambda: self._harness.metric("marlaas_operator_reconciles_total", kind="RLJob", outcome="ok"),
            len(self._names),
        )

    async def latency(self, number: int) -> list[list[object]]:
        """Report progress of one job after the other, and measure the time until a GET shows it."""
        bus = await self._harness.connect_orchestrator()
        orchestrator = ScriptedOrchestrator(bus)
        drawn = random.Random(0).sample(self._names, min(number, len(self._names)))
        times = [
            await self._one(orchestrator, *name, step)
            for name, step in zip(drawn, itertools.cycle((1, 2, 3)), strict=False)
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

    async def _one(self, orchestrator: ScriptedOrchestrator, place: str, name: str, step: int) -> float:
        began = time.monotonic()
        await orchestrator.say(
            place, name, phase="Queued", admitted=False, reason="WaitingForPool", message="waits", step=step
        )

        async def look() -> Any:
            body = await self._harness.gateway.get(Target(RLJOBS, place, name))
            return body["status"].get("step") == step

        await eventually(self._harness, "progress shows", look, 30.0, _POLL_S)
        return time.monotonic() - began

    async def _quiet(self, count: Callable[[], float], at_least: int) -> float:
        """Return the time at which `count` last changed, once it is at least `at_least` and has not changed for QUIET_S."""
        seen, moved_at = -1.0, time.monotonic()
        deadline = moved_at + _PATIENCE_S
        while True:
            now, value = time.monotonic(), count()
            if value != seen:
                seen, moved_at = value, now
            if value >= at_least and now - moved_at >= QUIET_S:
                return moved_at
            assert now < deadline, f"{value:.0f} of {at_least} after {_PATIENCE_S:.0f} s\n{self._harness.words()}"
            await asyncio.sleep(0.1)


def _stored_at(place: str, name: str) -> str:
    return b64encode(f"/registry/marlaas.dev/rljobs/{place}/{name}".encode()).decode()


def percentile(values: list[float], part: int) -> float:
    """Return the smallest value that at least the given percentage of the values do not exceed."""
    return sorted(values)[max(0, -(-len(values) * part // 100) - 1)]
