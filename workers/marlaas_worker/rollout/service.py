"""The rollout role: builds the parts that serve one engine, starts, drains and stops them in order, and reports their state and metrics."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Collection, Mapping, Sequence, Sized
from functools import cached_property
from pathlib import Path

from marlaas_api.bucket_cache import REREAD_S
from marlaas_api.bus import BusUnavailable
from marlaas_api.cpu_shares import engine_share, set_share
from marlaas_api.messages import JobAgent, JobDocument, PoolDocument, ReplicaReport
from marlaas_worker.calibration import rounding_warning
from marlaas_worker.metrics import Sample, of_report
from marlaas_worker.reporter import EventEmitter, Reporter
from marlaas_worker.role import RoleContext, wait_for
from marlaas_worker.rollout.adapter_cache import AdapterCache
from marlaas_worker.rollout.conversation import NoChatTemplate
from marlaas_worker.rollout.engine import Engine
from marlaas_worker.rollout.engine_progress import EngineCounts
from marlaas_worker.rollout.generation import Generation, Tokenizers
from marlaas_worker.rollout.policies import Pins, Policies, strict
from marlaas_worker.rollout.reception import Reception
from marlaas_worker.rollout.reload_pace import ReloadPace
from marlaas_worker.rollout.replies import EndingTokenizer
from marlaas_worker.rollout.request_limiter import RequestLimiter
from marlaas_worker.rollout.requests import Requests
from marlaas_worker.rollout.self_test import Calibrations, EngineSelfTest
from marlaas_worker.rollout.served_jobs import ServedJobs
from marlaas_worker.rollout.supervised_engine import SupervisedEngine
from marlaas_worker.rollout.templates import warnings
from marlaas_worker.rollout.tokenizer import PretrainedTokenizer
from marlaas_worker.rollout.turn_log import TurnLog
from marlaas_worker.rollout.versions import Versions

DRAIN_S = 20.0
SHARE_S = 0.1
"""Seconds between two settings of the CPU share; the kernel allows ten changes a second."""
COARSE = "EngineRoundsCoarsely"
_log = logging.getLogger(__name__)


async def serve(context: RoleContext, pool: PoolDocument) -> None:
    """Serve a pool until the role is stopped. Raises Permanent if the model or the engine cannot be loaded."""
    tokenizer = await asyncio.to_thread(PretrainedTokenizer.load, pool.model_path, pool.spec.chat_template)
    for text in tokenizer.ends.notes:
        _log.warning("%s", text)
    engine = await asyncio.to_thread(open_engine, context, pool, tokenizer.end_ids)
    await serve_engine(context, pool.name, tokenizer, engine, pool.spec.rollout.agents_per_slot)


def open_engine(context: RoleContext, pool: PoolDocument, end_ids: frozenset[int]) -> Engine:
    """Build the engine that the pool's `rollout.engine` names, not started yet. Imports only the libraries of that engine.

    context: has the local folder for vLLM's files. end_ids: the model's end tokens; each ends a generation.
    """
    model = Path(pool.model_path)
    if pool.spec.rollout.engine == "reference":
        from marlaas_worker.rollout.reference_engine import ReferenceEngine

        return ReferenceEngine(model, pool.spec, end_ids)
    from marlaas_worker.rollout.vllm_engine import VllmEngine

    return VllmEngine(model, pool.spec, end_ids, context.scratch, may_fork=True)


async def serve_engine(
    context: RoleContext, pool: str, tokenizer: EndingTokenizer, engine: Engine, agents_per_slot: int = 1
) -> None:
    """Start an engine, serve a pool with it until the role is stopped, and stop the engine.

    Args:
        pool: name of the pool.
        tokenizer: with the pool's chat template.
        engine: not started yet.
        agents_per_slot: the pool's setting; it is only copied into this replica's reports.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            rollout = _Rollout(context, pool, tokenizer, engine, tasks)
            rollout.agents_per_slot = agents_per_slot
            await rollout.live()
    finally:
        await engine.stop()


class _Rollout:
    """All components of the role, connected with each other. tasks: owns all tasks of the role. agents_per_slot: for reports."""

    def __init__(
        self, context: RoleContext, pool: str, tokenizer: EndingTokenizer, engine: Engine, tasks: asyncio.TaskGroup
    ) -> None:
        self._context = context
        self._pool = pool
        self.agents_per_slot = 1
        self._tasks = tasks
        self._background: list[asyncio.Task[None]] = []
        self._began = asyncio.get_running_loop().time()
        self._changed = asyncio.Event()
        self._failure = ""
        self._probe_distance = 0.0
        self._coarse = ""
        self._phase = "the engine is starting"
        self._calibrations = Calibrations(context.bus, pool, engine.base, engine.limits.dtype)
        self._engine = SupervisedEngine(engine, self._test, self._engine_stopped, self._engine_restarted)
        self._policies = Policies(context.bus, pool, self._changed.set)
        self._emitter = EventEmitter(context, "rollout")
        self._tokenizers = Tokenizers(tokenizer)
        self._reporter = Reporter(context, ("rollout", pool), self._report)
        self._jobs = ServedJobs()
        self._adapter_cache = AdapterCache(self._policies, self._jobs, context.blobs, context.scratch / "adapters")
        self._versions = Versions(self._engine, self._adapter_cache, self._jobs, self._emitter, self._reporter.changed)
        self._log = TurnLog(context.bus, context.blobs)
        generation = Generation(
            context=context,
            tokenizers=self._tokenizers,
            engine=self._engine,
            policies=self._policies,
            pins=Pins(context.bus),
            versions=self._versions,
            jobs=self._jobs,
            log=self._log,
        )
        self._requests = Requests(context, self._jobs, generation.play, tasks)
        self._reception = Reception(context, pool, self._requests, self._engine)
        context.metrics.ready = self._ready
        context.metrics.samples = self._samples

    @cached_property
    def _warnings(self) -> Mapping[str, str]:
        """The warnings about the pool's chat template, by reason. They are logged when this is first read."""
        texts = warnings(self._tokenizers.pool)
        for reason, text in texts.items():
            _log.warning("%s: %s", reason, text)
        return texts

    async def live(self) -> None:
        """Run the role: start the engine, serve until the stop event, then drain."""
        self._background = [self._tasks.create_task(self._reporter.run(), name="report")]
        await self._adapter_cache.empty()
        try:
            if await self._start_unless_stopped():
                self._begin()
                await self._context.stop.wait()
                await self._drain()
                _log.info("%s", self._engine.counts)
                _log.info("%s", self._versions.pace)
        finally:
            self._requests.close()
        for task in self._background:
            task.cancel()
        await self._reporter.withdraw()

    async def _start_unless_stopped(self) -> bool:
        starting = self._tasks.create_task(self._engine.start(), name="engine start")
        stopped = self._tasks.create_task(self._context.stop.wait(), name="stop")
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        starting.cancel()
        return self._engine.up

    def _begin(self) -> None:
        self._reporter.changed()
        for name, work in (
            ("policies", self._policies.follow()),
            ("replicas", self._reception.follow()),
            ("versions", self._versions.reconcile()),
            ("engine", self._engine.supervise()),
            ("heartbeats", self._requests.send_heartbeats()),
            ("events", self._emitter.run()),
            ("subscriptions", self._steer()),
        ):
            self._background.append(self._tasks.create_task(work, name=name))
        if self._context.shares_cpu:
            self._background.append(self._tasks.create_task(self._share_cpu(), name="CPU share"))

    async def _steer(self) -> None:
        """Follow the jobs that are admitted, until cancelled.

        Subscribe to the requests of their agents, cancel the requests of other jobs, and set the newest versions to preload.
        """
        try:
            while True:
                self._changed.clear()
                served = self._policies.served()
                await self._listen(served)
                jobs, on_others = {one.ref for one in served}, self._reception.placed_on_others()
                await self._requests.cancel_others(jobs)
                self._versions.charge_slots(jobs, asyncio.get_running_loop().time())
                self._versions.proven.prefer(self._policies.newest(served), strict(served), on_others)
                await self._drop_gone_jobs()
                await wait_for(self._changed, REREAD_S)
        finally:
            await self._reception.close()

    async def _share_cpu(self) -> None:
        """Set the CPU share of this process's session, which contains the engine, until cancelled."""
        while True:
            set_share(os.getpid(), engine_share(self._versions.proven.longest_wait_s()))
            await asyncio.sleep(SHARE_S)

    async def _listen(self, served: Sequence[JobAgent]) -> None:
        accepted = () if self._requests.closed else served
        await self._warn({one.document.uid: one.document for one in accepted}.values())
        try:
            await self._reception.listen_to(accepted)
        except BusUnavailable as error:
            _log.warning("cannot subscribe to the requests of all jobs: %s", error)

    async def _warn(self, documents: Collection[JobDocument]) -> None:
        """Emit warnings about jobs' chat templates, once per job. A refused template gets no warning: the first turn fails with the reason."""
        for document in documents:
            job = self._jobs.of(document.ref)
            with contextlib.suppress(NoChatTemplate):
                tokenizer = await self._tokenizers.of(document)
                if not job.is_warned:
                    texts = self._warnings if tokenizer is self._tokenizers.pool else warnings(tokenizer)
                    for reason, text in texts.items():
                        self._emitter.queue(job.ref, reason, text, once=f"{reason}-{job.ref.key}-{job.ref.uid}")
                    job.is_warned = True
        self._tokenizers.keep(documents)

    async def _drop_gone_jobs(self) -> None:
        self._engine.limiter.episodes.close_old()
        documents = self._policies.documents()
        gone = self._jobs.drop_gone({one.ref for one in documents}, asyncio.get_running_loop().time())
        if not gone:
            return
        totals, tenants = self._engine.meter.tenant_tokens, {one.tenant for one in documents}
        for tenant in totals.keys() - tenants:
            del totals[tenant]
        for job in gone:
            await self._adapter_cache.discard_job(job.ref)

    async def _drain(self) -> None:
        self._requests.close()
        self._changed.set()
        self._reporter.changed()
        await self._requests.drain(DRAIN_S)

    async def _test(self, engine: Engine) -> None:
        """Wait for the calibration, then run the self-test. Raises SelfTestFailed, EngineDown.

        Each incarnation of the engine must pass the self-test before it serves.
        """
        self._phase = ""
        self._reporter.changed()
        calibration = await self._calibrations.wait()
        self._phase = "the engine's self-test is running"
        self._reporter.changed()
        test = EngineSelfTest(calibration, self._context.scratch / "self-test", self._engine.slot_numbers)
        self._probe_distance = await test.run(engine)
        self._coarse = rounding_warning(self._probe_distance, calibration)

    def _ready(self) -> bool:
        return self._engine.up and not self._requests.closed

    def _reason(self) -> str:
        """Return the reason why the replica is not ready; empty if it is ready."""
        if self._ready():
            return ""
        return "the replica is draining" if self._requests.closed else self._phase or self._calibrations.reason

    def _engine_stopped(self, reason: str) -> None:
        self._failure = reason
        self._phase = f"the engine is restarting: {reason}"
        self._versions.engine_stopped()

    def _engine_restarted(self) -> None:
        self._versions.engine_restarted()
        self._reporter.changed()
        text = f"the engine of {self._context.name} was restarted ({self._failure}); its requests are tried again"
        for job in {served.document.ref for served in self._policies.served()}:
            self._emitter.queue(job, "EngineRestarted", text)

    def _samples(self) -> list[Sample]:
        jobs = {one.document.uid: one.document.ref for one in self._policies.served()}
        return [
            *of_report(self._report(0), jobs),
            *_version_samples(self._versions.proven.names, self._versions.pace, self._engine.limits.slots),
            *_place_samples(self._engine.limiter, self._log.num_waiting),
            *_engine_samples(self._engine.counts, self._engine.limits.kv_tokens, self._engine.restarts),
        ]

    def _report(self, rss_bytes: int) -> ReplicaReport:
        now, limits = asyncio.get_running_loop().time(), self._engine.limits
        meter = self._engine.meter
        meter.advance(now)
        used = [one for one in self._jobs if one.used.num_requests]
        cut = [one for one in used if one.preempted.num_requests]
        return ReplicaReport(
            role="rollout",
            pool=self._pool,
            replica=self._context.name,
            slots=limits.slots,
            max_rank=limits.max_rank,
            max_model_len=limits.max_model_len,
            agents_per_slot=self.agents_per_slot,
            ready=self._ready(),
            reason=self._reason(),
            notices={**self._warnings, **({COARSE: self._coarse} if self._coarse else {})},
            probe_tolerance=self._calibrations.tolerance,
            probe_distance=self._probe_distance,
            verified=self._versions.proven.names,
            kv_tokens=limits.kv_tokens,
            num_running=meter.num_running,
            num_waiting=self._engine.limiter.num_waiting + self._versions.proven.num_waiting,
            job_tokens={one.ref.uid: one.used.tokens for one in used},
            tenant_tokens=dict(meter.tenant_tokens),
            job_engine_s={one.ref.uid: one.used.engine_s for one in used},
            job_preempted_tokens={one.ref.uid: one.preempted.tokens for one in cut},
            job_preempted_engine_s={one.ref.uid: one.preempted.engine_s for one in cut},
            agent_slot_s={one.ref.uid: slot_s for one in self._jobs if (slot_s := one.slot_s(now))},
            agent_tokens=meter.agents.at(now),
            job_turn_bytes={one.ref.uid: one.turn_bytes for one in self._jobs if one.turn_bytes},
            busy_s=meter.busy_s,
            wall_s=now - self._began,
            restarts=self._engine.restarts,
            rss_bytes=rss_bytes,
            at=self._context.now(),
        )


def _version_samples(verified: Sized, pace: ReloadPace, slots: int) -> list[Sample]:
    """Return the metrics of adapter versions and their loads.

    verified: the versions that may be served. pace: counts and times the loads. slots: number of adapter slots.
    """
    return [
        Sample("marlaas_rollout_slots", "gauge", "Adapter slots of the engine.", slots),
        Sample("marlaas_rollout_versions", "gauge", "Adapter versions that may be served.", len(verified)),
        Sample("marlaas_rollout_loads_total", "counter", "Adapter versions loaded and proven.", pace.num_loads),
        Sample("marlaas_rollout_reloads_total", "counter", "Loads of evicted versions.", pace.num_reloads),
        Sample("marlaas_rollout_load_seconds_total", "counter", "Engine time of all loads.", pace.load_s),
        Sample("marlaas_rollout_reload_seconds_total", "counter", "Engine time of re-loads.", pace.reload_s),
    ]


def _place_samples(limiter: RequestLimiter, turns_waiting: int) -> list[Sample]:
    """Return the metrics of waiting requests, of reserved KV cache tokens, and of turns that wait to be recorded.

    limiter: of the engine's requests. turns_waiting: number of generated turns for which the turns stream has no room.
    """
    reserved = limiter.budget.num_reserved
    return [
        Sample("marlaas_rollout_waiting", "gauge", "Requests that wait for a place in the batch.", limiter.num_waiting),
        Sample("marlaas_rollout_turns_waiting", "gauge", "Turns that wait: the stream is full.", turns_waiting),
        Sample("marlaas_rollout_kv_tokens_reserved", "gauge", "Tokens reserved by requests.", reserved),
    ]


def _engine_samples(counts: EngineCounts, kv_tokens: int, restarts: int) -> list[Sample]:
    """Return the metrics of the engine. While `RequestLimiter` works, the engine's own queue is empty and it preempts no request.

    Args:
        counts: the engine's own counters.
        kv_tokens: tokens that fit into the KV cache; 0 if unknown.
        restarts: number of successful restarts of the engine since the role's start.
    """
    name = "marlaas_rollout_engine"
    return [
        Sample("marlaas_rollout_kv_tokens", "gauge", "Tokens that fit into the KV cache.", kv_tokens),
        Sample(f"{name}_restarts_total", "counter", "Restarts of the engine.", restarts),
        Sample(f"{name}_requests_total", "counter", "Requests that the engine received.", counts.requests),
        Sample(f"{name}_preemptions_total", "counter", "Requests whose KV cache it took away.", counts.preemptions),
        Sample(f"{name}_steps_total", "counter", "Batches.", counts.steps),
        Sample(f"{name}_queued_steps_total", "counter", "Batches without room for all.", counts.queued_steps),
        Sample(f"{name}_queue", "gauge", "Requests for which the last batch had no room.", counts.queued),
    ]
