"""Replicas of the rollout role on one bus, the parts of orchestrator, trainer and sandbox, and a job with the requests of its sandbox."""

import asyncio
import contextlib
from dataclasses import dataclass, field, replace

from tests.harness import Harness, a_manifest, identity, job_document
from tests.rollout.service import scripted

from marlaas_api import messages, subjects, wire
from marlaas_api.blobs import BlobRef
from marlaas_api.names import AdapterRef, episode_id, train_group
from marlaas_api.wire import pack_ids, pack_logprobs
from marlaas_worker.adapters import read_adapter, tensor_digests
from marlaas_worker.role import RoleContext
from marlaas_worker.rollout.service import serve_engine

LAST = (messages.ReplyPhase.RESULT, messages.ReplyPhase.FAILED)


@dataclass
class Job:
    document: messages.JobDocument

    @property
    def uid(self):
        return self.document.uid

    def adapter(self, version, agent="policy"):
        return AdapterRef(self.document.namespace, self.document.job, self.uid, agent, version)

    def request(self, index=0, member=0, turn=0, **changes):
        group = train_group(self.document.ref, index)
        place = {"group": group, "member": member, "episode": episode_id(group, member, 1), "turn": turn}
        question = messages.ChatMessage(role="user", content=f"question {turn}")
        said = {"parent": turn - 1 if turn else None, "append": (question,)}
        fields = {**identity(self.document), "agent": "policy", **place, **said, "deadline_s": 60.0}
        return messages.GenerateRequest(**{**fields, **changes})

    def cancel(self, kind=messages.CancelRequest):
        return kind(**self.request().model_dump(include={"namespace", "job", "uid", "agent", "episode"}))


@dataclass
class Asked:
    heard: list[messages.GenerateReply] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    more: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, reply):
        self.heard.append(reply)
        self.more.set()
        if reply.phase in LAST:
            self.over.set()

    @property
    def without_heartbeats(self):
        """Phases of the replies; a slow machine adds heartbeats."""
        return [reply.phase for reply in self.heard if reply.phase is not messages.ReplyPhase.HEARTBEAT]

    async def until(self, phase):
        return await self._next(lambda reply: reply.phase is phase)

    async def until_it_says(self, doing):
        """The first heartbeat from now on that says that the request does this."""
        beat = messages.ReplyPhase.HEARTBEAT
        return await self._next(lambda reply: reply.phase is beat and doing in reply.doing, len(self.heard))

    async def _next(self, wanted, first=0):
        while True:
            for reply in self.heard[first:]:
                if wanted(reply):
                    return reply
            self.more.clear()
            await self.more.wait()

    async def end(self):
        await self.over.wait()
        return next(reply for reply in self.heard if reply.phase in LAST)


@dataclass
class Replica:
    name: str
    engine: scripted.ScriptedEngine
    context: RoleContext
    task: "asyncio.Task[None]"

    async def stop(self):
        self.context.stop.set()
        await self.task

    async def kill(self):
        """As kill -9 would: nothing is drained, nothing is said."""
        await self.context.bus.close()
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
            await self.task


class RolloutHarness(Harness):
    def __init__(self, scratch, **fields):
        super().__init__(scratch, **fields)
        self.replicas: list[Replica] = []
        self._manifests: dict[AdapterRef, BlobRef] = {}
        self._jobs = 0
        self.shares_cpu = False

    async def replica(self, name="rollout-0", engine=None, tokenizer=None):
        """Start a replica, and wait until it can serve; its engine lets everything go unless it was given."""
        if engine is None:
            engine = scripted.ScriptedEngine()
            engine.open.set()
        await self.calibrate(engine)
        replica = await self.begin(name, engine, tokenizer)
        await self.report(name, lambda report: report.ready)
        return replica

    async def begin(self, name, engine, tokenizer=None):
        """Start a replica, whether or not it can ever serve."""
        context = await self.context(name)
        context = replace(context, scratch=self.scratch / f"{name}-{len(self.replicas)}", shares_cpu=self.shares_cpu)
        serving = serve_engine(context, scripted.POOL, tokenizer or scripted.CharacterTokenizer(), engine)
        replica = Replica(name, engine, context, asyncio.create_task(serving))
        self.replicas.append(replica)
        return replica

    async def serving(self, engine=None, **spec):
        return await self.replica(engine=engine), await self.job(**spec)

    async def calibrate(self, engine, **changes):
        """The trainer's part before any engine serves: what such engines score under no adapter and under the self-test's."""
        calibration = scripted.calibration_of(engine).model_copy(update=changes)
        await self.put(subjects.CALIBRATIONS, subjects.calibration_key(scripted.POOL, calibration.dtype), calibration)

    async def job(self, name="job", admitted=True, **spec):
        self._jobs += 1
        parts = {"poolRef": {"name": scripted.POOL}, "training": {"steps": 1, "maxStaleness": 1}, **spec}
        job = Job(job_document(name, "team", f"uid{self._jobs}", pool=scripted.POOL, seed=7, spec=parts))
        await self.admit(job, admitted)
        await self.commit(job, 0)
        return job

    async def admit(self, job, admitted=True):
        phase = messages.Phase.RUNNING if admitted else messages.Phase.QUEUED
        await super().admit(job.document, phase=phase, admitted=admitted)

    async def publish(self, job, version, seed=None, agent="policy", **changes):
        """Put a version's blobs; the policy does not yet point to it. `seed` makes its tensors, the version if not given."""
        adapter = job.adapter(version, agent)
        folder = self.scratch / "published" / adapter.engine_name
        files = scripted.write_version(folder, version if seed is None else seed)
        tensors, config = read_adapter(folder)
        gains = [scripted.gain(folder)] * (len(scripted.PROBE) - 1)
        fields = {
            "parent": self._manifests.get(job.adapter(version - 1, agent)),
            "files": {name: await self.blobs.put(adapter.blob_prefix, name, data) for name, data in files.items()},
            "tensor_digests": tensor_digests(tensors, config.scaling),
            "probes": (messages.Probe(ids=pack_ids(scripted.PROBE), logprobs=pack_logprobs(gains)),),
        }
        manifest = a_manifest(job.document, version, **{**fields, "agent": agent, **changes})
        ref: BlobRef = await self.blobs.put(adapter.blob_prefix, "manifest", wire.encode(manifest))
        self._manifests[adapter] = ref
        return ref

    async def commit(self, job, version, ref=None, agent="policy", **changes):
        ref = ref or await self.publish(job, version, agent=agent, **changes)
        await self.put_policy(messages.PolicyRecord(uid=job.uid, version=version, manifest=ref), job.document, agent)

    async def commit_verified(self, job, version, name="rollout-0"):
        await self.commit(job, version)
        await self.verified(name, job.adapter(version))

    async def pin(self, request, version):
        key = subjects.pin_key(request.namespace, request.job, request.agent, request.group)
        await self.put(subjects.PINS, key, messages.Pin(version=version))

    @contextlib.asynccontextmanager
    async def asking(self, request, of=None):
        """Ask the pool, or one replica directly, and listen."""
        asked, inbox = Asked(), self.bus.new_inbox()

        async def hear(reply):
            asked.hear(wire.decode_as(messages.GenerateReply, reply.data))

        async with self.bus.listen(inbox, hear):
            subject = subjects.generation(request.namespace, request.job, request.agent)
            await self.bus.send(subjects.engine(scripted.POOL, of) if of else subject, wire.encode(request), inbox)
            yield asked

    async def ask(self, request, of=None):
        """Ask until somebody listens, as a sandbox does, and return the end of it."""
        while True:
            async with self.asking(request, of) as asked:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await asked.more.wait()
                if asked.heard:
                    return await asked.end()

    async def result(self, request, of=None):
        reply = await self.ask(request, of)
        assert reply.phase is messages.ReplyPhase.RESULT, reply.error
        return reply

    async def failure(self, request, of="rollout-0"):
        reply = await self.ask(request, of)
        assert reply.phase is messages.ReplyPhase.FAILED
        return reply

    async def turn(self, request):
        subject = subjects.turn(request.namespace, request.job, request.episode, request.turn)
        stored = await self.bus.last(subjects.TURNS, subject)
        return None if stored is None else wire.decode_as(messages.Turn, stored.data)

    async def report(self, name, wanted):
        return await self.reported(wanted, "rollout", name, scripted.POOL)

    async def verified(self, name, adapter):
        await self.report(name, lambda report: adapter.engine_name in report.verified)

    async def close(self):
        self.server.available = True
        for replica in self.replicas:
            replica.engine.open.set()
            if not replica.task.done():
                await replica.kill()
