"""Finds the job, the policy version and the pin of a request, in caches of the buckets `jobs`, `progress`, `policy` and `pins`.

A record with another uid than the job's belongs to an earlier job of the same name, and counts as absent.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Hashable, Iterable
from weakref import WeakValueDictionary

from marlaas_api import subjects, wire
from marlaas_api.bucket_cache import BucketCache
from marlaas_api.bus import Bucket, Bus
from marlaas_api.errors import Permanent, Retryable
from marlaas_api.failpoints import failpoint
from marlaas_api.fenced import FencedKey, Overtaken
from marlaas_api.messages import GenerateRequest, JobAgent, JobDocument, JobSpec, Pin, PolicyRecord, Progress, agents_on
from marlaas_api.messages.agent_settings import AgentSettings
from marlaas_api.names import (
    BRANCH_TURNS,
    PREEMPTION_STRIDE,
    SCORES,
    AdapterRef,
    AgentRef,
    JobRef,
    attempt_of,
    end_of_turns,
    group_token,
    is_attempt,
)
from marlaas_worker.rollout.served_jobs import ServedJob

_PIN_BYTES = 320
"""Estimated bytes of memory of a cached pin, without the name of its group."""
_QUOTED = 200
"""Most characters of a name in a request that an error quotes."""


class RequestRefused(Permanent):
    """A request that can never be served; the text has the reason."""


class NotAdmitted(Retryable):
    """The job is not admitted now (queued, suspended or finished)."""


class Policies:
    """Caches of the buckets `jobs`, `progress` and `policy`.

    Args:
        pool: name of the pool whose agents this replica serves.
        changed: called when a job's document, its admission, or the committed version of an agent changes. Other writes do not call it:
            counters in progress, and leases in policy records, change far more often.
    """

    def __init__(self, bus: Bus, pool: str, changed: Callable[[], None]) -> None:
        self._pool = pool
        self._jobs = BucketCache(lambda: bus.bucket(subjects.JOBS), JobDocument, lambda _: changed())
        self._progress = BucketCache(
            lambda: bus.bucket(subjects.PROGRESS), Progress, lambda _: changed(), relevant=_admission
        )
        self._policy = BucketCache(
            lambda: bus.bucket(subjects.POLICY), PolicyRecord, lambda _: changed(), relevant=_committed
        )

    async def follow(self) -> None:
        """Keep the caches up to date, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for cache in (self._jobs, self._progress, self._policy):
                group.create_task(cache.follow())

    def served(self) -> list[JobAgent]:
        """Return all agents of admitted jobs on this pool."""
        return [
            served
            for _, document, _ in self._jobs.items()
            if not document.deleted and _admits(self._progress.get(document.ref.key), document.ref)
            for served in agents_on(self._pool, document)
        ]

    def documents(self) -> list[JobDocument]:
        """Return the documents of all jobs, on any pool."""
        return [document for _, document, _ in self._jobs.items()]

    def newest(self, agents: Iterable[JobAgent]) -> list[AdapterRef]:
        """Return the newest committed version of each of these agents. Agents without a committed version are left out.

        Agents whose next step trains demonstrations are left out too: their versions are loaded only if an evaluation requests them.
        """
        pairs = ((served, self._policy.get(served.policy_key)) for served in agents)
        return [
            served.adapter(record.version)
            for served, record in pairs
            if record is not None and record.uid == served.document.uid and record.manifest is not None
            if record.step + 1 >= served.document.spec.demonstrated_steps
        ]

    async def find(self, request: GenerateRequest) -> JobAgent:
        """Return the agent whose policy a request's agent plays.

        Reads the job and its admission from the bus if the cached ones are missing, of another uid, deleted, or not admitted. Reads the
        job's progress again if the request follows a preemption that the cached progress does not count yet.

        Raises RequestRefused (no such job, another uid, no such agent on this pool, inconsistent names), NotAdmitted,
        BusUnavailable.
        """
        job = request.ref
        document = self._jobs.get(job.key)
        if document is None or document.uid != job.uid or document.deleted:
            document = await self._jobs.read(job.key)
        if document is None or document.deleted:
            raise RequestRefused(f"there is no job {job}")
        if document.uid != job.uid:
            raise RequestRefused(f"job {job} has uid {document.uid}; this request is of an earlier one, {job.uid}")
        await self._require_admitted(document.ref)
        played = _player(document, request.agent).policy_name
        for served in agents_on(self._pool, document):
            if served.agent.name == played:
                _check(request, document)
                if attempt_of(request.episode) // PREEMPTION_STRIDE > self.num_preemptions(job):
                    await self._progress.read(job.key)
                return served
        raise RequestRefused(f"job {job} has no agent {request.agent!r} on pool {self._pool}")

    def num_preemptions(self, job: JobRef) -> int:
        """Return how often a job was preempted, by its cached progress; 0 without one."""
        progress = self._progress.get(job.key)
        return progress.num_preemptions if progress is not None and progress.uid == job.uid else 0

    async def record(self, adapter: AdapterRef) -> PolicyRecord | None:
        """Return the policy record of an adapter's agent; None if there is none with the uid of the adapter's job.

        Reads the bus if the cached record is missing, of another uid, without a manifest, or older than the adapter's version. The result
        may still be older, for example while the version is not committed yet. Raises BusUnavailable.
        """
        key = subjects.policy_key(adapter.namespace, adapter.job, adapter.agent)
        record = self._policy.get(key)
        if record is None or record.uid != adapter.uid or record.version < adapter.version or record.manifest is None:
            record = await self._policy.read(key)
        return record if record is not None and record.uid == adapter.uid else None

    async def _require_admitted(self, job: JobRef) -> None:
        if _admits(self._progress.get(job.key), job):
            return
        if not _admits(await self._progress.read(job.key), job):
            raise NotAdmitted(f"job {job} is not admitted now")


def strict(agents: Iterable[JobAgent]) -> list[AgentRef]:
    """Return the agents of strict jobs (maxStaleness 0), in which one version of an agent samples a whole step."""
    return [one.agent_ref for one in agents if one.document.spec.training.max_staleness == 0]


def _admission(progress: Progress | None) -> Hashable:
    return None if progress is None else (progress.uid, progress.admitted)


def _committed(record: PolicyRecord | None) -> Hashable:
    return None if record is None else (record.uid, record.version, record.manifest)


def _admits(progress: Progress | None, job: JobRef) -> bool:
    return progress is not None and progress.uid == job.uid and progress.admitted


def _check(request: GenerateRequest, document: JobDocument) -> None:
    """Refuse a request if its names are inconsistent, no episode can have its turn number, or it gives a reply that must be sampled.

    A request without a reply is refused if its group is demonstrated. Pins, seeds and records depend on the names and the turn number.
    Names become parts of subjects and keys, so their length is bounded too: the NATS server disconnects a
    client that sends a subject of 32 KiB, and that client would be this replica. Raises RequestRefused.
    """
    uid, group, spec = document.uid, request.group, document.spec
    try:
        token, size = group_token(group), spec.sampling(group).group_size
    except ValueError as error:
        raise RequestRefused(str(error)[:_QUOTED]) from error
    if group != f"{uid}-{token}":
        raise RequestRefused(f"group {group[:_QUOTED]!r} is not of job uid {uid}")
    if not 0 <= request.member < size:
        raise RequestRefused(f"member {request.member} of a group of {size}")
    if not is_attempt(request.episode, group, request.member):
        raise RequestRefused(
            f"episode {request.episode[:_QUOTED]!r} is not of member {request.member} of group {group!r}"
        )
    if spec.demonstrates(group) != (request.demonstration is not None):
        found = (
            "is demonstrated, and the request has no reply"
            if request.demonstration is None
            else "is sampled, and the request gives a reply"
        )
        raise RequestRefused(
            f"group {group} {found}: only the steps of supervised fine-tuning take replies from environments"
        )
    if request.scores is None:
        _check_turn(request, spec)
    else:
        _check_score(request, request.scores, spec)


def _check_turn(request: GenerateRequest, spec: JobSpec) -> None:
    """Refuse a turn number out of range or of another agent, a parent not before the turn, a token limit below 1. Raises RequestRefused."""
    names = [agent.name for agent in spec.agents]
    own, position = divmod(request.turn, len(names))
    if not 0 <= request.turn < end_of_turns(len(names)) or own % BRANCH_TURNS >= spec.rollout.max_turns:
        raise RequestRefused(
            f"turn {request.turn} is out of range: an agent has at most {spec.rollout.max_turns} turns (maxTurns)"
        )
    if names[position] != request.agent:
        raise RequestRefused(f"turn {request.turn} is agent {names[position]}'s, not agent {request.agent[:_QUOTED]}'s")
    if request.parent is not None and not 0 <= request.parent < request.turn:
        raise RequestRefused(f"turn {request.turn} cannot follow turn {request.parent}")
    if request.max_tokens is not None and request.max_tokens < 1:
        raise RequestRefused(f"maxTokens is {request.max_tokens}; at least 1 is needed")


def _check_score(request: GenerateRequest, scored: int, spec: JobSpec) -> None:
    """Refuse scores by another agent than the job's teacher, or with another turn number than SCORES + `scored`. Raises RequestRefused.

    scored: number of the last turn of the conversation that is scored.
    """
    if request.agent != spec.teacher:
        raise RequestRefused(f"agent {request.agent[:_QUOTED]} is asked for scores, and the teacher is {spec.teacher}")
    if (
        not 0 <= scored < end_of_turns(len(spec.agents))
        or request.turn != SCORES + scored
        or request.parent is not None
    ):
        raise RequestRefused(f"turn {request.turn} after {request.parent} is not the score of turn {scored}")


def _player(document: JobDocument, name: str) -> AgentSettings:
    """Return the agent of this name; if the job has none, default settings with that name, which no pool serves."""
    return next((agent for agent in document.spec.agents if agent.name == name), AgentSettings(name=name))


class PinMissing(Retryable):
    """The group has no pin, and only the orchestrator may create it; or its pin was deleted while this role read it."""


def pinned_by_orchestrator(document: JobDocument, agent: AgentSettings, group: str) -> bool:
    """Return whether only the orchestrator may pin a group of an agent.

    It alone pins the groups of strict jobs (maxStaleness 0), evaluation groups, and the groups of agents that play past versions.

    Raises ValueError if the group's name is not valid (`names.group_token`).
    """
    return agent.plays_past or document.spec.training.max_staleness == 0 or group_token(group).startswith("e")


def refreshes(request: GenerateRequest, document: JobDocument) -> bool:
    """Return whether a turn may be sampled by a newer version than the one to which its group is pinned.

    That is so if the job's `rollout.refresh` is `turn` and this role may pin the group. The pin is then the group's oldest version.
    """
    is_pinned = pinned_by_orchestrator(document, _player(document, request.agent), request.group)
    return document.spec.rollout.refresh == "turn" and not is_pinned


def past_caller(request: GenerateRequest, document: JobDocument) -> tuple[str, int] | None:
    """Return the arguments `caller` and `num_open` of `ServedAgent.call`, if requests may use an old version after newer ones were committed.

    Returns:
        For an evaluation group: `(evaluation)`, and 1. For an agent that plays past versions: its name, and the most versions that it uses
        at a time, one for each open step. Otherwise None: the request does not need its version for longer than others.
    """
    if group_token(request.group).startswith("e"):
        return "(evaluation)", 1
    return (request.agent, 1 + document.spec.steps_ahead) if _player(document, request.agent).plays_past else None


class Pins:
    """Reads pins, and caches them in `ServedJob.pins`. Creates missing ones; concurrent requests for one pin share one bus call.

    A pin names the policy version that samples a group, or the oldest such version (`refreshes`). The first pin counts and never changes.
    The orchestrator pins evaluation groups, the groups of past versions, and in strict mode all groups, before it publishes their tasks.
    This role never pins those: a missing pin is an error, so that no group is sampled from a wrong version.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._bucket: Bucket | None = None
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def knows(self, job: ServedJob, request: GenerateRequest, document: JobDocument) -> bool:
        """Return whether the pin of the request's agent and group is in memory. document: the job's."""
        return (_player(document, request.agent).pinned_as, request.group) in job.pins

    async def version(
        self, job: ServedJob, request: GenerateRequest, document: JobDocument, newest: Callable[[], Awaitable[int]]
    ) -> int:
        """Return the version to which the request's agent and group are pinned. If there is no pin yet, create it.

        Args:
            job: keeps the pins that are in memory.
            document: the job's.
            newest: returns the version for a new pin; may wait for one.

        Raises PinMissing, BusUnavailable, and errors of `newest`.
        """
        agent = _player(document, request.agent)
        name = agent.pinned_as, request.group
        if (known := job.pins.get(name)) is not None:
            return known
        key = subjects.pin_key(request.namespace, request.job, *name)
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            if (known := job.pins.get(name)) is None:
                known = await self._find_or_create(key, request, document, agent, newest)
                job.pins.put(name, known, sys.getsizeof(request.group) + _PIN_BYTES)
            return known

    async def _find_or_create(
        self,
        key: str,
        request: GenerateRequest,
        document: JobDocument,
        agent: AgentSettings,
        newest: Callable[[], Awaitable[int]],
    ) -> int:
        bucket = self._bucket = self._bucket or await self._bus.bucket(subjects.PINS)
        if (pin := await _read(bucket, key)) is not None:
            return pin.version
        if pinned_by_orchestrator(document, agent, request.group):
            raise PinMissing(
                f"group {request.group} of agent {request.agent} has no pin yet; the orchestrator creates it"
            )
        wanted = Pin(version=await newest())
        try:
            await FencedKey(bucket, key).write(wire.encode(wanted))
        except Overtaken:
            if (pin := await _read(bucket, key)) is not None:
                return pin.version
            raise PinMissing(f"the pin of group {request.group} was deleted while it was read") from None
        failpoint("rollout.pin.after_create")
        return wanted.version


async def _read(bucket: Bucket, key: str) -> Pin | None:
    entry = await bucket.get(key)
    return None if entry is None or entry.data is None else wire.decode_as(Pin, entry.data, f"the Pin of key {key}")
