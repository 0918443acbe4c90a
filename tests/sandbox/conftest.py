"""Fixtures of the sandbox role's tests: a memory bus, real child processes, and a hand-written rollout role."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.harness import Harness, identity, job_document

from marlaas_api import messages, subjects
from marlaas_api.names import Split, derive_seed, train_group
from marlaas_api.wire import decode, decode_as, encode
from marlaas_worker.sandbox import service
from marlaas_worker.sandbox.service import serve
from marlaas_worker.sandbox.session import ChildSession
from marlaas_worker.sandbox.turns import TurnTimeouts

Answer = Callable[[messages.GenerateRequest], list[messages.GenerateReply]]
QUICK_RETRIES = TurnTimeouts(first_retry_s=0.01, max_retry_s=0.02)


def _reply(request, phase):
    return messages.GenerateReply(request=f"{request.episode}.{request.turn}", phase=phase, replica="rollout-0")


class Rollout:
    """Plays the rollout role: `answer` says what comes back for a request, by default the reply `1`."""

    def __init__(self, server):
        self.bus = server.connect("rollout")
        self.answer: Answer = lambda request: [self.result(request, "1")]
        self.requests: list[messages.GenerateRequest] = []
        self.cancelled: list[messages.CancelRequest] = []
        self.kept: list[messages.KeepRequest] = []
        self.changed = asyncio.Event()
        self._open: dict[str, tuple[messages.GenerateRequest, str]] = {}

    @staticmethod
    def result(request, text, stop=messages.StopReason.STOP):
        return _reply(request, messages.ReplyPhase.RESULT).model_copy(
            update={"text": text, "stop_reason": stop, "num_tokens": 3}
        )

    @staticmethod
    def failure(request, words, retryable):
        return _reply(request, messages.ReplyPhase.FAILED).model_copy(update={"error": words, "retryable": retryable})

    @staticmethod
    def beat(request, running_s=None):
        return _reply(request, messages.ReplyPhase.HEARTBEAT).model_copy(update={"running_s": running_s})

    async def on_request(self, request):
        message = decode(request.data)
        self.changed.set()
        if isinstance(message, messages.CancelRequest):
            self.cancelled.append(message)
            return
        if isinstance(message, messages.KeepRequest):
            self.kept.append(message)
            return
        assert isinstance(message, messages.GenerateRequest)
        self.requests.append(message)
        self._open[f"{message.episode}.{message.turn}"] = message, request.reply
        await self._reply(message, request.reply)

    async def answer_open(self, answer=None):
        """Answer requests like this from now on, by default with the reply `1`, and those that are open at once."""
        self.answer = answer or (lambda request: [self.result(request, "1")])
        for message, inbox in list(self._open.values()):
            await self._reply(message, inbox)

    async def _reply(self, message, inbox):
        for reply in self.answer(message):
            if reply.phase in (messages.ReplyPhase.RESULT, messages.ReplyPhase.FAILED):
                self._open.pop(reply.request, None)
            await self.bus.send(inbox, encode(reply))

    async def until(self, condition):
        while not condition():
            self.changed.clear()
            await self.changed.wait()


class SandboxHarness(Harness):
    """One job and what it needs; `open` runs a sandbox for it. The bus's clock goes on by `later` only."""

    def __init__(self, scratch):
        super().__init__(scratch)
        self.at = 1000.0
        self.server.clock = lambda: self.at
        self.rollout = Rollout(self.server)
        self.timeouts = QUICK_RETRIES
        self.load_timeout_s = 60.0
        """How long the environment may take to load, however little an episode may take."""

    def later(self, seconds):
        self.at += seconds
        self.server.wake()

    modules: Path | None = None
    """The folder of the job's manifest."""

    def document(self, name, *, agents=("policy",), **environment: object):
        spec = {"agents": [{"name": agent} for agent in agents], "rollout": {"maxTurns": 4}}
        played = {"name": name, "max_attempts": 1, **environment}
        return job_document("job", uid="u1", spec={**spec, "environment": played})

    def task(self, document, index=0, group_size=1):
        place = {"group": train_group(document.ref, index), "split": Split.TRAIN, "index": index}
        seed = derive_seed(0, Split.TRAIN, index)
        return messages.TaskMessage(**identity(document), **place, seed=seed, group_size=group_size)

    async def put_task(self, task):
        await self.bus.publish(subjects.task(task.namespace, task.job), encode(task))

    async def open_tasks(self):
        return await self.bus.consumer(
            subjects.TASKS, "team-a_job_sandbox", "task.team-a.job", ack_wait_s=subjects.TASK_ACK_WAIT_S
        )

    async def num_tasks(self):
        return len(await self.bus.replay(subjects.TASKS, "task.*.*"))

    @contextlib.asynccontextmanager
    async def rollout_role(self, *agents: str):
        async with contextlib.AsyncExitStack() as stack:
            for agent in agents:
                subject = subjects.generation("team-a", "job", agent)
                await stack.enter_async_context(self.rollout.bus.listen(subject, self.rollout.on_request, "rollout"))
            yield

    @contextlib.asynccontextmanager
    async def open(self, document, name="sandbox-0", socket=None):
        await self.bus.ensure()
        await self.open_tasks()
        context = await self.context(name)
        async with self.rollout_role(*(agent.name for agent in document.spec.agents)), asyncio.TaskGroup() as group:
            group.create_task(serve(context, document, self.timeouts, socket, self.modules))
            try:
                yield context
            finally:
                context.stop.set()

    async def episodes(self, num, start=1):
        consumer = await self.bus.consumer(subjects.EPISODES, f"test-{start}", "episode.*.*")
        found: list[messages.Episode] = []
        while len(found) < num:
            for delivery in await consumer.fetch(1, 1.0):
                found.append(decode_as(messages.Episode, delivery.stored.data))
                await delivery.ack()
        return found

    async def play(self, name, group_size=1, **environment: object):
        """Play one group of an environment of `rogues` (or a builtin's) and return its episodes, by member."""
        document = self.document(name if ":" in name else f"rogues:{name}", **environment)
        return await self.play_document(document, group_size)

    async def play_document(self, document, group_size=1, name="sandbox-0", socket=None):
        async with self.open(document, name, socket):
            await self.put_task(self.task(document, group_size=group_size))
            return sorted(await self.episodes(group_size), key=lambda episode: episode.member)


@pytest.fixture
def harness(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)  # behind it: the tree under test
    made, configured = SandboxHarness(tmp_path), service._children_config

    def with_time_to_load(context, document, socket):
        """On a slow machine an episode's small time is over before a fork server has even started."""
        return replace(configured(context, document, socket), load_timeout_s=made.load_timeout_s)

    monkeypatch.setattr(service, "_children_config", with_time_to_load)
    return made


@pytest.fixture
def _time_is_over(monkeypatch):
    """An episode's time is over once it has said "from here on"."""
    answer = ChildSession._answer

    async def last(session, child, asked):
        await answer(session, child, asked)
        if "from here on" in str(asked.append):
            session._left_s = 0.0

    monkeypatch.setattr(ChildSession, "_answer", last)
