"""docs/explanation/architecture.md, "Three ways through the code": the lists are the files that the code runs through."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from tests.architecture.ways import Way, enter_way, files_on_the_way, listed_files
from tests.rollout.service.asking import Job
from tests.rollout.service.harness import RolloutHarness

from marlaas.environment import Message, Reply
from marlaas.environment_types import TurnRequest
from marlaas_api.bus import Request
from marlaas_api.bus_memory import MemoryBus
from marlaas_api.messages import TaskMessage
from marlaas_api.names import Split, episode_id, train_group
from marlaas_worker.sandbox.channel import MAX_FRAME_BYTES, SupervisorChannel, encode_frame, receive_frame
from marlaas_worker.sandbox.server import Child
from marlaas_worker.sandbox.session import ChildSession
from marlaas_worker.sandbox.turns import TurnClient

QUESTION = Message("user", "one?")
_T = TypeVar("_T")


async def test_the_way_of_a_turn_is_as_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = RolloutHarness(tmp_path)
    handlers_are_on_the_way(monkeypatch)
    await harness.bus.ensure()
    await harness.replica()
    job = await harness.job()
    await harness.verified("rollout-0", job.adapter(0))
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_FRAME_BYTES)
    child = Child(1, reader, writer, cast("Any", None), cast("Any", None))
    with files_on_the_way() as way:
        replies = await asyncio.create_task(play(harness, job, child, asyncio.to_thread(ask_twice, theirs, way)))
    writer.close()
    theirs.close()
    await harness.close()
    assert [reply.text for reply in replies] == ["yes", "yes"]
    listed = listed_files("A turn")
    assert sorted(way.files) == sorted(listed)
    assert len(listed) <= 12
    way.require_one_direction()


def handlers_are_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count what the listeners of the bus call: they run in tasks of the bus."""
    listen = MemoryBus.listen

    def listening(self: MemoryBus, subject: str, handler: Callable[[Request], Awaitable[None]], queue: str = "") -> Any:
        async def handle(request: Request) -> None:
            enter_way()
            await handler(request)

        return listen(self, subject, handle, queue)

    monkeypatch.setattr(MemoryBus, "listen", listening)


async def play(harness: RolloutHarness, job: Job, child: Child, asking: Coroutine[Any, Any, _T]) -> _T:
    """Play an episode: the supervisor's session here, and `asking` as the child."""
    document, group = job.document, train_group(job.document.ref, 0)
    identity = document.model_dump(include={"namespace", "job", "uid"})
    task = TaskMessage(**identity, group=group, split=Split.TRAIN, index=0, seed=0, group_size=1)
    async with TurnClient(harness.bus) as turns:
        asked = asyncio.create_task(asking)
        await ChildSession(document, turns, task, 0, episode_id(group, 0, 1)).run(child)
        return await asked


def ask_twice(connection: socket.socket, way: Way) -> list[Reply]:
    """The child, in a thread: ask for two turns of one conversation, then end the episode."""
    receive_frame(connection)
    channel = SupervisorChannel(connection)
    with way.recorded():
        first = channel.turn(TurnRequest("policy", None, (QUESTION,)))
        second = channel.turn(TurnRequest("policy", first.turn, (QUESTION,), number=1, num_before=1))
    score = {"kind": "score", "rewards": {"policy": 1.0}, "metrics": {}, "ending": "completed", "tool_s": 0.0}
    connection.sendall(encode_frame(score))
    return [first, second]
