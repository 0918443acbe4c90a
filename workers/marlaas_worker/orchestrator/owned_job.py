"""The control loop of one admitted job: read records, decide (`job_state`), act, report.

Crash-only: after a Retryable error, the job's state is rebuilt from its records, and the loop continues.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence

from marlaas_api import subjects
from marlaas_api.bus import Consumer
from marlaas_api.errors import MarlaasError, Retryable
from marlaas_api.last_words import visible
from marlaas_api.messages import (
    Episode,
    EvalSample,
    JobDocument,
    JobWait,
    Phase,
    Progress,
    StepClosed,
    UsageAmounts,
)
from marlaas_api.retries import patiently
from marlaas_worker.orchestrator import reports as job_reports
from marlaas_worker.orchestrator import step_records
from marlaas_worker.orchestrator.capacity import trainerless, unserved
from marlaas_worker.orchestrator.diagnosis import GivenUp
from marlaas_worker.orchestrator.evaluation import EvaluationRun, evaluated_text
from marlaas_worker.orchestrator.issuing import IssueHolds, TaskIssuer
from marlaas_worker.orchestrator.job_state import JobState
from marlaas_worker.orchestrator.metering import Metering
from marlaas_worker.orchestrator.records import Records, SharedState
from marlaas_worker.orchestrator.retention import Retention
from marlaas_worker.orchestrator.steps import Decision
from marlaas_worker.orchestrator.stream_space import FULL, TIGHT, EpisodeSize, JobSpace
from marlaas_worker.orchestrator.usage import AdmittedTime, JobUsage
from marlaas_worker.role import RoleContext, wait_for

log = logging.getLogger(__name__)

RETRY_S, TICK_S, LISTEN_S = 0.3, 1.0, 5.0
TICKS_PER_S = 64.0  # Most of all idle jobs together: with more than 64 jobs, each one's tick is longer than TICK_S.
NUM_SAMPLES = 5
CUT_S = 5.0
"""Longest time to read the turns of the plays that a preemption cuts: the admissions of all other jobs wait meanwhile."""
MAX_TOLD = 32
"""Maximum number of events of a job about files, threads and processes that were left behind when its environment was loaded."""
_RECORDS = "records"
_FULL = "the stream TURNS is full: turns wait until steps are on record and their turns are purged"


class OwnedJob:
    """The control loop of a job, from its admission to its end.

    Attributes:
        document: the job's present document (`revise`).
        wake: event; set it to run the next iteration at once.
        moved: whether an iteration has run since `Jobs.take_moved` reset it.
        times: when the job was admitted, and how often it was preempted.
        holds: reasons for which the job issues no tasks.
        ended: phase, reason and message of the job's end; None while it goes on.

    Args:
        context: of the orchestrator's process.
        before: the job's published progress, from which times and usage continue; None if there is none.
        shared: state that all jobs of this orchestrator share.
    """

    def __init__(
        self, context: RoleContext, document: JobDocument, before: Progress | None, shared: SharedState
    ) -> None:
        self.document = document
        self.wake, self.moved = asyncio.Event(), True
        self._context, self._reports, self._stream = context, shared.reports, shared.space
        self._policies, self._num_jobs, self._recoveries = shared.policies, shared.num_jobs, shared.recoveries
        self.times = AdmittedTime.of(before, context.now())
        self._records = Records(context, document, self.times.num_preemptions)
        self._issuer = TaskIssuer(self._records, shared.reports)
        self.holds, self._given_up = IssueHolds(), GivenUp()
        self._usage = JobUsage.of(document.uid, before)
        self._retention = Retention(context.bus, document.ref, context.now)
        self._space = JobSpace(shared.space, document.uid, document.spec, EpisodeSize())
        self._num_episodes = 0
        self._told: set[str] = set()
        self._state: JobState | None = None
        self._seen = job_reports.Seen()
        self._metering: Metering  # of the present state
        self.ended: tuple[Phase, str, str] | None = None

    async def run(self) -> None:
        """Run the job until it has ended (`ended` has the result) or until cancelled."""
        name = f"job {self.document.ref} reads its records again"
        await patiently(self._run_once, name, RETRY_S, retried=lambda error: isinstance(error, Retryable))

    async def _run_once(self) -> None:
        """Restore the job's state from its records, and run the job.

        After a Retryable error, the job ends if its deadline has passed; otherwise the error is raised.
        """
        try:
            await self._run_from_records()
        except Retryable as error:
            self._context.waits.note(self.document.uid, _RECORDS, error)
            self.ended = job_reports.overdue(self.document, self.times.total_s(self._context.now()), str(error))
            self.moved = True
            if self.ended is None:
                raise

    def revise(self, document: JobDocument) -> None:
        """Replace the document by one that needs no restart of the loop (`concerns_loop`), such as a new deadline."""
        self.document = self._records.document = document
        if self._state is not None:
            self._state.document = document
        self.wake.set()

    def preempt(self, why: str) -> None:
        """Begin or end the preemption of the job.

        A preempted job begins no step. `may_stop` becomes true at its next step boundary, or after `issuing.DRAIN_S` seconds.

        why: the reason, as text for people; empty: the job is not preempted, and goes on.
        """
        if self.holds.preempt(why, self._context.now()):
            self.wake.set()

    def release_space(self) -> None:
        """Release the job's space in the stream TURNS, once its loop has stopped."""
        self._space.release()

    @property
    def may_stop(self) -> bool:
        """Whether the job is preempted and may be stopped now (`IssueHolds.may_stop`)."""
        return self.ended is None and self.holds.may_stop(self._state, self._context.now())

    async def cut_plays(self) -> UsageAmounts:
        """Return the usage of the plays that this job's preemption cuts. Call it once the loop has stopped.

        If its records cannot be read now, return no usage: then these plays are counted only when their groups are decided.
        """
        if self._state is None:
            return UsageAmounts()
        try:
            async with asyncio.timeout(CUT_S):
                members = self._state.open_members()
                # The loop may have stopped before it read the last ones.
                async for _, episode in self._records.episodes():
                    members.discard((episode.group, episode.member))
                return await self._metering.of_cut_plays(members, self.times.num_preemptions)
        except (MarlaasError, TimeoutError) as error:
            log.warning("%s: cannot read what its preemption cuts: %r", self.document.ref, error)
            return UsageAmounts()

    async def _run_from_records(self) -> None:
        ref = self.document.ref
        state = JobState(self.document, await self._records.history())
        await self._records.compact(state.ledger(), state.finished - 1)
        # Read the queue before the episodes: a task leaves the queue only after all its episodes are stored.
        queued = await self._records.queued()
        async with self._recoveries:
            async for sequence, episode in self._records.episodes():
                self._retain(state, sequence, episode)
                state.add_episode(episode)
        state.document = self.document  # `revise` may have replaced it while the records were read.
        self._space.size.known = self._space.size.known or state.episode_bytes
        self._state = state
        bus, blobs, agents = self._context.bus, self._context.blobs, self.document.spec.agents
        self._metering = Metering(bus, blobs, ref, agents, state.is_undecided)
        await self._issuer.restore_pins(state)
        name = subjects.consumer(ref.namespace, ref.name, "orchestrator")
        consumer = await self._context.bus.consumer(
            subjects.EPISODES, name, subjects.episode(ref.namespace, ref.name), max_pending=100_000
        )
        await self._records.open_tasks()
        await self._issuer.reissue(state, queued)
        listener = asyncio.create_task(self._listen(state, consumer), name=f"episodes {ref}")
        try:
            while self.ended is None:
                await self._advance(state)
                if self.ended is None:
                    await self._sleep(listener)
        finally:
            listener.cancel()
            # `await listener` would not distinguish a cancellation of this task from one of the listener.
            await asyncio.wait({listener})
            error = None if listener.cancelled() else listener.exception()
            if error is not None and not isinstance(error, Retryable):
                raise error

    async def _sleep(self, listener: "asyncio.Task[None]") -> None:
        if listener.done():
            listener.result()
        await wait_for(self.wake, max(TICK_S, self._num_jobs() / TICKS_PER_S))
        self.wake.clear()

    async def _listen(self, state: JobState, consumer: Consumer) -> None:
        while True:
            for delivery in await consumer.fetch(64, LISTEN_S):
                episode = self._records.episode(delivery.stored)
                if episode is not None:
                    self._retain(state, delivery.stored.sequence, episode)
                    await self._tell(episode.load_notes)
                    state.add_episode(episode)
                    self._num_episodes += 1
                await delivery.ack()
                self.wake.set()

    async def _tell(self, notes: Sequence[str]) -> None:
        """Emit an event for each new note about files, threads and processes that loading the environment left behind.

        Each text is emitted once, and at most MAX_TOLD texts in all. notes: `Episode.load_notes`.
        """
        for note in notes:
            if note not in self._told and len(self._told) < MAX_TOLD:
                self._told.add(note)
                await self._records.emit("EnvironmentLoaded", visible(note))

    def _retain(self, state: JobState, sequence: int, episode: Episode) -> None:
        self._retention.add_episode(sequence, episode.group if state.is_open(episode.group) else None)

    async def _advance(self, state: JobState) -> None:
        for agent in state.policies:
            state.policies[agent] = await self._records.cached_policy(agent, self._policies)
        self._usage.see(list(self._reports()), self._context.now())
        if state.has_policies:
            if min(state.assembly.versions.values()) < 0:
                state.assembly.begin(state.versions)
                await self._records.emit("PolicyPublished", "version 0 is published; training begins")
            await self._decide(state)
            while await self._record(state):
                await self._decide(state)
            self._measure(state)
            await self._retention.purge(at_once=self._stream.is_filled(TIGHT))
            await self._issue(state)
            await self._evaluate(state)
            self._seen = job_reports.Seen(
                self.holds.over_quota,
                self._space.why or (_FULL if self._stream.is_filled(FULL) else ""),
                unserved(self.document, self._reports()),
                trainerless(self.document, job_reports.training_pools(state), self._reports()),
            )
        self._context.waits.over(self.document.uid, _RECORDS)
        given_up = self._given_up.words(self.document, self._reports(), self._context.now())
        self.ended = job_reports.ending(state, self._seen, given_up, self.times.total_s(self._context.now()))
        self.moved = True

    async def _decide(self, state: JobState) -> None:
        """Assign complete groups to steps and close full steps, until no more is possible. Log each decision before it changes the state."""
        sampled = [
            (await self._issuer.sampled_from(state, group), group)
            for group in state.groups.resolvable(in_order=state.assembly.is_in_order)
        ]
        ready, asked = state.assembly.in_order(sampled), set[int]()
        while True:
            await self._learn_oldest(state, asked)
            if (closed := state.assembly.closing()) is not None:
                await self._log(state, closed)
            decided = state.assembly.next_decision(ready)
            if decided is not None:
                ready.remove(decided)
                versions, group = decided
                usage = await self._metering.of_group(group)
                await self._log(state, state.assembly.decision(group, versions, usage))
            elif closed is None:
                return

    async def _learn_oldest(self, state: JobState, asked: set[int]) -> None:
        """Update `assembly.oldest`, the lower bounds of groups' versions, from the pins of the groups in flight for which a step may have to wait.

        asked: indices of groups whose pins were read earlier in this round. They are not read again; the indices read now are added.
        """
        unknown = set() if state.assembly.is_in_order else state.groups.in_flight - state.assembly.oldest.keys()
        for index in (unknown | state.assembly.urgent) - asked:
            state.assembly.oldest[index] = await self._issuer.oldest(state, index)
            asked.add(index)

    async def _log(self, state: JobState, decided: Decision) -> None:
        await self._records.log_decision(decided)
        state.apply(decided)
        if isinstance(decided, StepClosed):
            num = ", ".join(f"{part.num_groups} groups of {part.agent}" for part in decided.parts)
            log.info("closed step %d of job %s with %s", decided.step, self.document.ref, num)

    async def _record(self, state: JobState) -> bool:
        """Record the oldest step if it is finished; return whether it was."""
        draft = state.assembly.recordable(state.committed)
        if draft is None:
            return False
        around = step_records.around(state, draft, self.times.started_at, self._context.now())
        manifests = {
            agent: await self._records.manifest(state.policies[agent].manifest, draft.step)
            for agent, part in draft.agents.items()
            if part.assigned and agent not in around.untrained
        }
        record = step_records.step_record(self.document, draft, manifests, around)
        await self._records.log_step(record)
        state.apply(record)
        await self._records.compact(state.ledger(), record.step)
        await self._mark(state)
        return True

    def _measure(self, state: JobState) -> None:
        """Update the space in TURNS that the job holds and needs, estimated from the size of its latest episodes."""
        self._space.is_demonstrated = state.assembly.is_demonstrated
        self._space.size.see(self._context.now(), self._usage.turn_bytes.total, self._num_episodes)
        state.episode_bytes = self._space.size.known
        asks = self._want(state) > 0 or state.due_evaluation() is not None
        self._space.update(len(state.groups), evaluating=state.evaluation is not None, asks=asks)

    async def _mark(self, state: JobState) -> None:
        """Mark the episodes and turns that no recovery needs any more, for a later purge."""
        self._records.drop_pins(state.is_open)
        turns = await self._stream.refresh(self._context.bus, max_age_s=0.0)
        self._retention.mark_step(state.is_open, state.turns_from(turns.last_sequence))

    async def _issue(self, state: JobState) -> None:
        want = self._want(state)
        if want == 0:
            return
        turns = await self._stream.refresh(self._context.bus)
        number = self._space.take(len(state.groups), want, evaluating=state.evaluation is not None)
        if number == 0:
            return
        issued = state.issuing(number, turns.last_sequence)
        await self._records.log_issue(issued)
        state.apply(issued)
        state.assembly.oldest.update(dict.fromkeys(issued.indices, self._issuer.served(state)))
        await self._issuer.publish(state, issued.indices)

    def _want(self, state: JobState) -> int:
        """Return how many new groups the job should issue now, regardless of space in the stream TURNS; 0 while it may issue none."""
        if not self.holds.may_issue(state):
            return 0
        return state.assembly.want(len(state.groups.in_flight), self._issuer.served(state))

    async def _evaluate(self, state: JobState) -> None:
        run = None if self.holds.any else state.due_evaluation()
        if run is not None and self._space.may_evaluate(len(state.groups)):
            turns = await self._stream.refresh(self._context.bus)
            begun = state.beginning(run, turns.last_sequence)
            await self._records.log_issue(begun)
            state.apply(begun)
            await self._issuer.publish_evaluation(state, run)
        run = state.evaluation
        if run is None or not run.complete:
            return
        samples = [await self._sample(state, run, key) for key in run.sampled(NUM_SAMPLES)]
        usage = await self._metering.of_evaluation(run.episodes.values())
        end = step_records.EvaluationEnd(self._context.now(), tuple(samples), usage, state.trained_prompts)
        record = step_records.eval_record(self.document, run, end)
        await self._records.log_evaluation(record)
        state.apply(record)
        await self._records.compact(state.ledger(), state.finished - 1)
        await self._records.emit("Evaluated", evaluated_text(record))
        self.wake.set()

    async def _sample(self, state: JobState, run: EvaluationRun, key: tuple[int, int]) -> EvalSample:
        episode, (suite, task) = run.episodes[key], run.settings.at(key[0])
        turns = {
            agent: await self._records.conversation(episode.episode, next(iter(leaves[-1:]), None))
            for agent, leaves in episode.leaves.items()
        }
        found = step_records.sample(episode, turns, state.trained)
        return found.model_copy(update={"suite": suite.name, "index": task})

    def progress(self) -> Progress | None:
        """Return the job's progress as of now; None until its records are read."""
        if self._state is None:
            return None
        standing = self.ended or job_reports.doing(self._state, self._seen)
        return job_reports.progress(self._state, self._usage, self.times, standing, self._context.now())

    def progress_after(self, before: Progress | None) -> Progress:
        """Return the job's progress as of now. If failures keep the job waiting, reason and message are those of the longest wait.

        before: the stored progress, from which results are taken until the job's records are read; None if there is none.
        """
        found = self.progress() or job_reports.admitted(self.document, before, self.times)
        return job_reports.delayed(found, self._waits())

    def _waits(self) -> Iterator[tuple[str, JobWait]]:
        """Yield the job's waits, for example for a blob store that fails, as (process, wait).

        process: `orchestrator` for this one; role and name of a worker of the job's pools otherwise.
        """
        uid = self.document.uid
        if (own := self._context.waits.reported().get(uid)) is not None:
            yield "orchestrator", own
        for report in self._reports():
            if report.pool in self.document.pools and (wait := report.waits.get(uid)) is not None:
                yield f"{report.role} {report.replica}", wait
