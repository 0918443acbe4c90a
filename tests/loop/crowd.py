"""A run of many small jobs in real processes, on a nats-server of the test's own, while its processes are killed."""

import asyncio
import json
import os
import signal
import sys
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats
import psutil
import yaml
from tests.loop.eager import PURGED
from tests.loop.harness import document

from marlaas_api import subjects
from marlaas_api.bus import Bus, Stored
from marlaas_api.bus_nats import connect
from marlaas_api.messages import Phase, ReplicaReport
from marlaas_api.nats_server import EmbeddedNats
from marlaas_api.wire import decode_as

HEAD = {"apiVersion": "marlaas.dev/v1alpha1"}
SLOTS = 6
"""Of each engine; an asynchronous team of two agents needs as many."""
KEPT = "team-e/kept"
"""A job that its tenant's quota never admits, so that the run goes on after all others have ended."""


def job(name: str, steps: int, staleness: int = 0, agents: tuple[str, ...] = ("policy",)) -> dict[str, Any]:
    """An RLJob; name: `namespace/name`. Several agents speak at the same time."""
    namespace, _, own = name.partition("/")
    made = document(
        own, steps=steps, maxStaleness=staleness, environment="reverse" if len(agents) == 1 else "teams:once"
    )
    named = tuple(made.spec.agents[0].model_copy(update={"name": agent}) for agent in agents)
    spec = made.spec.model_copy(update={"agents": named}).model_dump(mode="json", by_alias=True, exclude_defaults=True)
    spec["environment"] |= {"args": {"partial": True}} if len(agents) == 1 else {}
    return HEAD | {"kind": "RLJob", "metadata": {"name": own, "namespace": namespace}, "spec": spec}


def pool(model: Path) -> dict[str, Any]:
    """A pool whose engines admit SLOTS agents each; the versions of these take turns on as many slots."""
    rollout = {"engine": "reference", "dtype": "float32", "maxModelLen": 256, "agentsPerSlot": 1}
    spec = {"model": {"path": str(model)}, "adapterSlots": SLOTS, "maxRank": 8, "rollout": rollout}
    return HEAD | {"kind": "ModelPool", "metadata": {"name": "tiny"}, "spec": spec}


def kept() -> list[dict[str, Any]]:
    """The job `KEPT` and its tenant."""
    namespace = KEPT.partition("/")[0]
    spec = {"namespaces": [namespace], "quota": {"jobs": 0}}
    return [HEAD | {"kind": "Tenant", "metadata": {"name": namespace}, "spec": spec}, job(KEPT, 1)]


@dataclass
class Crowd:
    """A run.

    purged: folder of purged messages. seen: each job's last line of progress, by name. preempted: jobs that were.
    before_kill: the replicas' last reports before one of them was killed. killed_at: when it was, in unix seconds.
    """

    out: Path
    purged: Path
    nats: EmbeddedNats
    bus: Bus
    client: Any
    process: asyncio.subprocess.Process
    seen: dict[str, dict[str, Any]] = field(default_factory=dict)
    preempted: set[str] = field(default_factory=set)
    before_kill: dict[str, ReplicaReport] = field(default_factory=dict)
    killed_at: float = 0.0

    async def until(self, wanted: Callable[[], bool]) -> None:
        """Read the runner's lines until they are as wanted. Raises AssertionError if the run or all its jobs end before."""
        assert self.process.stdout is not None
        while not wanted():
            phases = self.phases().values()
            assert not phases or not all(Phase(one).final for one in phases), "all jobs have ended too early"
            text = await self.process.stdout.readline()
            assert text, f"the run has ended: {self.phases()}"
            line = json.loads(text)
            if line["type"] == "progress":
                self.seen[line["job"]] = line
                self.preempted |= {line["job"]} if line.get("reason") == "Preempted" else set()

    @property
    def steps(self) -> int:
        """Finished steps of all jobs."""
        return sum(line.get("step", 0) for line in self.seen.values())

    def phases(self) -> dict[str, str]:
        """Return the phases of all jobs but the kept one."""
        return {name: line["phase"] for name, line in self.seen.items() if name != KEPT}

    async def kill(self, name: str) -> None:
        """kill -9 a role, by its replica's name; the runner starts it again. The nats-server starts again at once."""
        if name == "nats-server":
            await self.nats.restart()
            return
        if name.startswith("rollout"):
            self.before_kill = await self._replicas()
        (victim,) = [one for one in psutil.Process(self.process.pid).children() if _name(one) == name]
        victim.send_signal(signal.SIGKILL)
        if name in self.before_kill:
            self.killed_at = time.time()

    async def _replicas(self) -> dict[str, ReplicaReport]:
        """Return the reports of the engines' replicas, by name."""
        entries = await (await self.bus.bucket(subjects.REPLICAS)).entries("rollout.")
        reports = [decode_as(ReplicaReport, one.data) for one in entries if one.data is not None]
        return {one.replica: one for one in reports}

    async def submit(self, *objects: dict[str, Any]) -> None:
        """Add jobs to the run."""
        manifest = self.out.with_suffix(".more.yaml")
        manifest.write_text(yaml.safe_dump_all(objects))
        await _marlaas("submit", "--run", str(self.out), str(manifest))

    async def end(self) -> int:
        """Cancel the job that keeps the run, and return the run's exit code."""
        namespace, _, name = KEPT.partition("/")
        await _marlaas("cancel", "--run", str(self.out), "-n", namespace, name)
        assert self.process.stdout is not None
        await self.process.stdout.read()
        return await self.process.wait()

    async def recorded(self, stream: str) -> list[Stored]:
        """Return all messages that TURNS or EPISODES ever had, in their order."""
        lines = [line for path in self.purged.glob("*.json") for line in json.loads(path.read_bytes())]
        purged = [Stored(subject, at, b64decode(data)) for name, at, subject, data in lines if name == stream]
        found = {one.sequence: one for one in [*purged, *await self.bus.replay(stream, ">")]}
        return [found[at] for at in sorted(found)]

    async def consumers(self) -> set[str]:
        """Return the durable consumers of all streams."""
        stream = self.client.jetstream()
        infos = [info for spec in subjects.STREAMS for info in await stream.consumers_info(spec.name)]
        return {info.name for info in infos if info.config.durable_name}


async def _marlaas(*arguments: str) -> None:
    command = await asyncio.create_subprocess_exec(sys.executable, "-m", "marlaas", *arguments)
    assert await command.wait() == 0


def _name(process: psutil.Process) -> str:
    """Return a role's name; empty for any other process."""
    try:
        line = process.cmdline()
    except psutil.Error:
        return ""
    return line[line.index("--name") + 1] if "--name" in line else ""


@asynccontextmanager
async def crowd(folder: Path, *objects: dict[str, Any]) -> AsyncIterator[Crowd]:
    """Run these objects with two replicas and two trainers. The folder for temporary files must be empty at the end."""
    manifest, out, temporary, purged = (folder / name for name in ("first.yaml", "out", "temporary", "purged"))
    manifest.write_text(yaml.safe_dump_all(objects))
    temporary.mkdir()
    async with EmbeddedNats(folder / "nats") as server:
        bus, client = await connect(server.url, name="test"), await nats.connect(server.url)
        await bus.ensure()
        command = [str(Path(__file__).with_name("eager.py")), "run", str(manifest), "--out", str(out), "--json"]
        options = ["--seed", "7", "--nats", server.url, "--replicas", "2", "--trainers", "2"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *command, *options),
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), PURGED: str(purged)}
            | {"PYTHONPATH": str(Path(__file__).parent)},  # for the teams' environments
        )
        try:
            yield Crowd(out, purged, server, bus, client, process)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await client.close()
            await bus.close()
    assert list(temporary.iterdir()) == []
