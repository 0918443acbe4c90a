"""`python-tool` in the sandbox role, as a job plays it: real child processes, a bus in memory, a script as the policy."""

import asyncio
import os
from pathlib import Path

from marlaas_api import subjects
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus import Request
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.documents import job_spec
from marlaas_api.kinds import RLJobSpec
from marlaas_api.messages import (
    ChatMessage,
    Ending,
    Episode,
    GenerateReply,
    GenerateRequest,
    JobDocument,
    ReplyPhase,
    StopReason,
    TaskMessage,
)
from marlaas_api.names import Split, derive_seed, train_group
from marlaas_api.wire import decode_as, encode
from marlaas_worker.role import RoleContext
from marlaas_worker.sandbox.service import serve

SUPERVISOR = os.getpid()  # the sandbox's supervisor runs in this process
ATTACKS = [
    "import socket; socket.create_connection(('127.0.0.1', 4222))",
    "import os\nwhile True: os.fork()",
    "held = []\nwhile True: held.append(bytearray(1 << 20))",
    "open('/tmp/from-a-policy', 'w')",
    f"print(open('/proc/{SUPERVISOR}/environ', 'rb').read())",
    f"open('/proc/{SUPERVISOR}/mem', 'rb')",
    "import os; print(open(f'/proc/{os.getppid()}/environ', 'rb').read())",
    "import os; os.kill(os.getppid(), 9)",
    f"import os; os.kill({SUPERVISOR}, 9)",
    "while True: print('x' * 1000)",
    "import time; time.sleep(10**6)",
]
ENDS = ["PermissionError", "MemoryError", "[stopped: it printed", "[stopped: it took longer"]
ARGS = {"cpu_s": 1, "memory_mib": 128}
IDENTITY = {"namespace": "team-a", "job": "job", "uid": "u1"}
SPEC = {
    "poolRef": {"name": "tiny"},
    "agents": [{"name": "policy"}],
    "environment": {"name": "python-tool", "args": ARGS, "max_attempts": 1, "concurrency": 4},
    "rollout": {"maxTurns": 2},
    "training": {"steps": 1},
}


class Script:
    """The rollout role: every member of the group attacks in its own way, and then gives up."""

    def __init__(self, server: MemoryServer) -> None:
        self.bus = server.connect("rollout")
        self.heard: dict[int, str] = {}

    async def on_request(self, request: Request) -> None:
        asked = decode_as(GenerateRequest, request.data)
        last = asked.append[-1]
        assert isinstance(last, ChatMessage)
        if asked.turn > 0:
            self.heard[asked.member] = last.content
        text = f"```python\n{ATTACKS[asked.member]}\n```" if asked.turn == 0 else "I give up."
        answered = {"request": f"{asked.episode}.{asked.turn}", "phase": ReplyPhase.RESULT, "replica": "rollout-0"}
        reply = GenerateReply(**answered, text=text, stop_reason=StopReason.STOP, num_tokens=3)
        await self.bus.send(request.reply, encode(reply))


async def played(server: MemoryServer, document: JobDocument, num: int, context: RoleContext) -> list[Episode]:
    bus = server.connect("test")
    place = {"group": train_group(document.ref, 0), "split": Split.TRAIN, "index": 0, "group_size": num}
    task = TaskMessage(**IDENTITY, **place, seed=derive_seed(0, Split.TRAIN, 0))
    subject, claimed = subjects.task("team-a", "job"), subjects.consumer("team-a", "job", "sandbox")
    await bus.consumer(subjects.TASKS, claimed, subject, ack_wait_s=subjects.TASK_ACK_WAIT_S)
    await bus.publish(subject, encode(task))
    consumer = await bus.consumer(subjects.EPISODES, "test", "episode.*.*")
    found: list[Episode] = []
    async with asyncio.TaskGroup() as group:
        group.create_task(serve(context, document))
        while len(found) < num:
            for delivery in await consumer.fetch(1, 1.0):
                found.append(decode_as(Episode, delivery.stored.data))
                await delivery.ack()
        context.stop.set()
    return sorted(found, key=lambda episode: episode.member)


async def test_every_attack_is_the_policys_doing_and_harms_no_episode(tmp_path: Path) -> None:
    server = MemoryServer()
    await server.connect("test").ensure()
    script = Script(server)
    spec = job_spec(RLJobSpec.model_validate(SPEC))
    document = JobDocument(**IDENTITY, pool="tiny", tenant="team-a", spec=spec)
    context = RoleContext("sandbox-0", server.connect("sandbox-0"), MemoryBlobs(), tmp_path)
    async with script.bus.listen(subjects.generation("team-a", "job", "policy"), script.on_request, "rollout"):
        episodes = await played(server, document, len(ATTACKS), context)
    scored = (None, "", Ending.COMPLETED, {"policy": 0.0})
    assert [(e.fault, e.fault_text, e.ending, e.rewards) for e in episodes] == [scored] * len(ATTACKS)
    assert {e.metrics["programs_failed"] for e in episodes} == {1.0}
    last_lines = [script.heard[member].splitlines()[-1] for member in range(len(ATTACKS))]
    assert all(any(line.startswith(end) for end in ENDS) for line in last_lines), last_lines
    assert "from-a-policy" not in os.listdir("/tmp")  # noqa: PTH208
