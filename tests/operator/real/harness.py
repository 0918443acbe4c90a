"""An operator as a real process between a real API server and a real bus; also what `bench operator` measures."""

import asyncio
import contextlib
import inspect
import json
import re
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tests.operator.objects import SYSTEM, installation, job, namespace, pool
from tests.operator.real.orchestrators import ADMITTED, ScriptedOrchestrator
from tests.operator.real.processes import ForkedOperator

from marlaas_api.bus_nats import NatsBus
from marlaas_api.bus_nats import connect as connect_bus
from marlaas_api.bus_users import BusKeys, OrchestratorUser, mint, server_config
from marlaas_api.nats_server import EmbeddedNats
from marlaas_e2e.control_plane import ControlPlane
from marlaas_e2e.processes import Daemon
from marlaas_operator.bus_keys import ensure_keys
from marlaas_operator.cluster import Body, NotFound, Target
from marlaas_operator.cluster.api_server import ApiServer, connect
from marlaas_operator.cluster.resources import EVENTS, KINDS, MANAGED, MODELPOOLS, OWNED, RLJOBS, SECRETS, target_of
from marlaas_operator.installation import Installation
from marlaas_operator.policies.conditions import CONTROLLER

PATIENCE_S = 60.0
SANDBOX = {"Deployment one-sandbox", "NetworkPolicy one-sandbox", "Secret one-sandbox", "ServiceAccount one-sandbox"}
Operator = ForkedOperator | Daemon
_PORT = re.compile(r"health and metrics on port (\d+)\n")


@dataclass
class OperatorHarness:
    """The pieces. `gateway` is the administrator's; the operator has its own.

    forks: operators are forked and not started anew. health: port of the operator's HTTP server, 0 until it is read from the log.
    """

    plane: ControlPlane
    gateway: ApiServer
    keys: BusKeys
    nats: EmbeddedNats
    installation: Installation
    folder: Path
    forks: bool = True
    operator: Operator | None = None
    health: int = 0
    started: list[Operator] = field(default_factory=list)

    def start_operator(
        self, *, failpoint: str = "", kubeconfig: Path | None = None, watch_s: float = 45, variant: str = ""
    ) -> Operator:
        """Start a new operator process; it is killed with the rig. failpoint and variant: see `ForkedOperator`."""
        self.health = 0
        log = self.folder / f"operator-{len(self.started)}.log"
        arguments = ["--installation", str(self.folder / "installation.yaml"), "--watch-seconds", str(watch_s)]
        # A port that was chosen here could be another process's by the time it is bound.
        arguments += ["--kubeconfig", str(kubeconfig or self.plane.kubeconfig), "--health", "0"]
        if self.forks:
            self.operator = ForkedOperator(arguments, log, failpoint, variant)
        else:
            self.operator = Daemon("operator", [sys.executable, "-m", "marlaas_operator", *arguments], log)
        self.operator.start()
        self.started.append(self.operator)
        return self.operator

    async def get(self, target: Target) -> Body | None:
        with contextlib.suppress(NotFound):
            return await self.gateway.get(target)
        return None

    async def job(self, namespace: str, name: str) -> Body | None:
        return await self.get(Target(RLJOBS, namespace, name))

    async def pool(self, name: str) -> Body | None:
        return await self.get(Target(MODELPOOLS, "", name))

    async def status(self, namespace: str, name: str) -> Body:
        """A job's status; empty if there is none, or no job."""
        body = await self.job(namespace, name)
        return dict((body or {}).get("status") or {})

    async def owned(self, *namespaces: str) -> dict[str, Body]:
        """Everything that the operator made there, Secrets included, as `Kind name`; not the bus's own keys."""
        found: dict[str, Body] = {}
        for resource in (*OWNED, SECRETS):
            for place in namespaces:
                for body in await self.gateway.list(resource, namespace=place, labels=MANAGED):
                    found[f"{resource.kind} {body['metadata']['name']}"] = body
        found.pop(f"Secret {self.installation.bus_secret}", None)
        return found

    async def events(self) -> list[str]:
        """What the operator told, as `kind/name reason`."""
        told = [body for body in await self.gateway.list(EVENTS) if body.get("reportingController") == CONTROLLER]
        regarding = [(body["regarding"], body["reason"]) for body in told]
        return sorted(f"{about['kind']}/{about['name']} {reason}" for about, reason in regarding)

    async def phase(self, namespace: str, name: str, *phases: str) -> Body:
        """Wait until a job is in one of the phases; its status."""
        accept = lambda status: status.get("phase") in phases  # noqa: E731
        look = lambda: self.status(namespace, name)  # noqa: E731
        found: Body = await eventually(self, f"{namespace}/{name} is {phases}", look, accept=accept)
        return found

    async def queue_job(self, place: str = "team-a", **operator: Any) -> Body:
        """Create the pool `tiny`, start an operator and create the job `one`; return its status once it is queued."""
        await self.gateway.create(pool("tiny"))
        self.start_operator(**operator)
        await self.gateway.create(job(place, "one", "tiny"))
        return await self.phase(place, "one", "Queued")

    async def run_job(self, orchestrator: ScriptedOrchestrator, place: str = "team-a", **operator: Any) -> None:
        """Queue the job `one` and have it admitted; return once it runs."""
        await self.queue_job(place, **operator)
        await orchestrator.say(place, "one", **ADMITTED)
        await self.phase(place, "one", "Running")

    async def gone(self, target: Target, timeout_s: float = PATIENCE_S) -> None:
        """Wait until an object does not exist any more."""
        await eventually(self, f"{target} is gone", lambda: self.get(target), timeout_s, accept=lambda it: it is None)

    async def owns(self, number: int, namespace: str = "team-a") -> None:
        """Wait until the operator has so many objects in a namespace."""
        accept = lambda found: len(found) == number  # noqa: E731
        await eventually(self, f"{number} objects", lambda: self.owned(namespace), accept=accept)

    async def says(self, condition: str, words: str) -> None:
        """Wait until the pool `tiny` has a condition of this type or reason, with these words in its message."""

        def told(pool: Body | None) -> bool:
            conditions = (pool or {}).get("status", {}).get("conditions", ())
            return any(condition in (one["type"], one["reason"]) and words in one["message"] for one in conditions)

        await eventually(self, f"the pool says {words}", lambda: self.pool("tiny"), accept=told)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels."""
        total = 0.0
        for line in self.endpoints("/metrics").splitlines():
            words, _, value = line.rpartition(" ")
            if words.partition("{")[0] == name and all(f'{key}="{want}"' in words for key, want in labels.items()):
                total += float(value)
        return total

    def endpoints(self, path: str) -> str:
        """Response of the operator's HTTP server; empty if it does not answer or listen yet."""
        if not self._is_open():
            return ""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health}{path}", timeout=5) as answer:
                return str(answer.read().decode())
        except (urllib.error.URLError, OSError):
            return ""

    def _is_open(self) -> bool:
        if not self.health and self.operator is not None:
            found = _PORT.search(self.operator.log.read_text(errors="replace"))
            self.health = int(found[1]) if found else 0
        return self.health != 0

    async def connect_orchestrator(self) -> NatsBus:
        """A connection with the orchestrator's rights; streams and buckets exist then."""
        creds = self.folder / "orchestrator.creds"
        creds.write_text(mint(self.keys, OrchestratorUser(), time.time()))
        bus = await connect_bus(self.nats.url, name="orchestrator", creds=creds)
        await bus.ensure()
        return bus

    def words(self) -> str:
        return "\n".join(f"--- {one.log.name}\n{one.last_words(40)}" for one in self.started)


async def eventually(
    harness: OperatorHarness,
    what: str,
    look: Callable[[], Any],
    timeout_s: float = PATIENCE_S,
    every_s: float = 0.1,
    *,
    accept: Callable[[Any], Any] = bool,
) -> Any:
    """What `look` gives, or what it awaits, once it is accepted. Bounded; a real server has no event that could be awaited."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = look()
        if inspect.isawaitable(found):
            found = await found
        if accept(found):
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"after {timeout_s:.0f} s still not: {what}, but {found!r:.2000}\n{harness.words()}")
        await asyncio.sleep(every_s)


@contextlib.asynccontextmanager
async def rigged(plane: ControlPlane, *, forks: bool = True) -> AsyncIterator[OperatorHarness]:
    """API server with our kinds, bus with users, no operator yet."""
    with tempfile.TemporaryDirectory(prefix="marlaas-rig-") as name:
        folder = Path(name)
        gateway = await connect(plane.kubeconfig)
        await clean(gateway)
        await gateway.apply(namespace(SYSTEM))
        keys = await ensure_keys(gateway, installation())
        nats = EmbeddedNats(folder / "nats", extra_config=server_config(keys))  # its port is its own choice, too
        await nats.start()
        found = installation(natsUrl=nats.url)
        (folder / "installation.yaml").write_text(yaml.safe_dump(json.loads(found.model_dump_json(by_alias=True))))
        harness = OperatorHarness(plane, gateway, keys, nats, found, folder, forks)
        try:
            yield harness
        finally:
            for process in harness.started:
                process.kill()
            await clean(gateway)
            await nats.stop()
            await gateway.close()


async def clean(gateway: ApiServer) -> None:
    for resource in KINDS:
        for body in await gateway.list(resource):
            if body["metadata"].get("finalizers"):
                await gateway.patch(target_of(body), {"metadata": {"finalizers": None}})
            await gateway.delete(target_of(body))
    for resource in (*OWNED, SECRETS):
        for body in await gateway.list(resource, labels=MANAGED):
            await gateway.delete(target_of(body))
    for body in await gateway.list(EVENTS):
        if body.get("reportingController") == CONTROLLER:
            await gateway.delete(target_of(body))
