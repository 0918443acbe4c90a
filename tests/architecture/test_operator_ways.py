"""docs/explanation/architecture.md lists the files of the operator's two ways: on the fakes, these files execute and no others."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType

import kopf
from tests.architecture.ways import listed_files
from tests.operator.objects import job, pool
from tests.operator.shell.harness import ONE, ServiceHarness

from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_operator import handlers
from marlaas_operator.cluster import Body, Resource, resource_of
from marlaas_operator.cluster.resources import KINDS, OWNED
from marlaas_operator.object_cache import ObjectCache
from marlaas_worker.orchestrator import service as orchestrator
from marlaas_worker.role import RoleContext

ROOT = Path(__file__).parents[2]
PACKAGES = {f"{ROOT}/operator/marlaas_operator/": "operator/", f"{ROOT}/workers/marlaas_worker/": "workers/"}
LEFT_OUT = "operator/marlaas_operator/cluster/"
ON_THE_WAY = ("event", "queue", "reconcile ")
"""Names of the tasks on the way. The others, such as the heartbeat of the bus, run beside it."""

End = Callable[[FrameType], bool]


class Trace:
    """Files of the operator whose functions are called by the tasks on the way, until `end` is true of a call."""

    def __init__(self, end: End) -> None:
        self.files: set[str] = set()
        self.ended = asyncio.Event()
        self._end = end

    def called(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or self.ended.is_set() or not _is_on_the_way():
            return
        if self._end(frame):
            self.ended.set()
        path = _path(frame)
        if path.startswith("operator/") and not path.startswith(LEFT_OUT):
            self.files.add(path)


class Decision:
    """Files with a function on the stack of the orchestrator's admission, or that its decision calls."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._deciding = 0

    def called(self, frame: FrameType, event: str, _: object) -> None:
        path = _path(frame)
        if path.endswith("orchestrator/admission.py") and frame.f_code.co_name == "decide":
            self._deciding += {"call": 1, "return": -1}.get(event, 0)
            caller: FrameType | None = frame
            while caller is not None:
                self.files.add(_path(caller))
                caller = caller.f_back
        elif self._deciding and event == "call":
            self.files.add(path)


def _is_on_the_way() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.get_name().startswith(ON_THE_WAY)


def _path(frame: FrameType) -> str:
    name = frame.f_code.co_filename
    return name.removeprefix(f"{ROOT}/") if name.startswith(tuple(PACKAGES)) else ""


@contextmanager
def profiled(called: Callable[[FrameType, str, object], None]) -> Iterator[None]:
    threading.setprofile(called)
    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class TracedHarness(ServiceHarness):
    """An operator whose watch events pass through kopf's handler."""

    def __init__(self) -> None:
        super().__init__()
        self.watching = asyncio.Event()
        self._events: list[asyncio.Task[None]] = []

    async def _watch(
        self, cache: ObjectCache, begun: Callable[[Resource], None], report: Callable[[str], None]
    ) -> None:
        memo = kopf.Memo(sink=handlers.cache_sink(cache, begun))

        def on_change(kind: str, body: Body) -> None:
            if (resource := resource_of(body)) in (*KINDS, *OWNED):
                event = {"type": kind, "object": body}
                observed = handlers.observed(event=event, resource=resource, memo=memo)
                self._events.append(asyncio.create_task(observed, name="event"))

        self.cluster.listeners.append(on_change)
        self.watching.set()
        await asyncio.Event().wait()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.server.connect("test").ensure()
        task = asyncio.create_task(self.service.run(self.stop))
        async with asyncio.timeout(60):
            await self.watching.wait()
        try:
            yield
        finally:
            self.stop.set()
            async with asyncio.timeout(20):
                await task


async def test_the_way_from_a_model_pool_to_its_pods_passes_the_listed_files() -> None:
    harness = TracedHarness()

    def is_last_object_applied(frame: FrameType) -> bool:
        body = frame.f_locals.get("body") if frame.f_code.co_qualname == "MemoryCluster.apply" else None
        return body is not None and (body["kind"], body["metadata"]["name"]) == ("StatefulSet", "tiny-trainer")

    trace = Trace(is_last_object_applied)
    async with harness.running(), asyncio.timeout(60):
        with profiled(trace.called):
            await harness.cluster.create(pool("tiny"))
            await trace.ended.wait()
    way = listed_files("A ModelPool to its pods")
    assert trace.files == set(way)
    assert len(way) == len(set(way)) <= 12


async def test_the_way_from_a_manifest_to_its_admission_passes_the_listed_files(tmp_path: Path) -> None:
    harness = TracedHarness()
    await harness.cluster.create(pool("tiny"))
    trace = Trace(lambda frame: frame.f_code.co_qualname == "MemoryBucket.create")
    async with harness.running(), asyncio.timeout(60):
        with profiled(trace.called):
            await harness.cluster.create(job("team-a", "one", "tiny"))
            await trace.ended.wait()
        decision = Decision()
        context = RoleContext("orchestrator", harness.server.connect("orchestrator"), MemoryBlobs(), tmp_path)
        with profiled(decision.called):
            role = asyncio.create_task(orchestrator.serve(context))
            await harness.until(lambda: harness.status(ONE).get("reason") == "WaitingForPool", "the job is queued")
        context.stop.set()
        await role
    way = listed_files("A manifest to its admission")
    assert trace.files | {path for path in decision.files if path.startswith("workers/")} == set(way)
    assert len(way) == len(set(way)) <= 11
