"""Messages about a job between the operator, the local runner and the orchestrator: its spec, its progress, its events."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from pydantic import Field

from marlaas_api import subjects
from marlaas_api.messages.agent_settings import AgentSettings
from marlaas_api.messages.base import BusMessage, JobMessage, SpecPart
from marlaas_api.messages.job_spec import JobSpec, QuantityText
from marlaas_api.messages.steps import SuiteResult
from marlaas_api.messages.usage import TokenUse, UsageAmounts, total
from marlaas_api.names import AdapterRef, AgentRef, JobRef


class JobVerdict(BusMessage):
    """The reason why a job cannot continue, found by the component that watches its pods.

    reason: CamelCase, for machines. message: for people, with advice.
    """

    reason: str
    message: str


class JobHold(BusMessage):
    """Why an admitted job cannot begin now: the API server refuses its pods. While it is active, the job is not admitted, so that others have its slots.

    until: unix seconds; then the job is tried again. num: refusals in a row, by which the time grows.
    """

    reason: str
    message: str
    until: float
    num: int = 1
    active: bool = True


class TenantQuota(SpecPart):
    """Limits of a tenant (`Tenant.spec.quota`). None: no limit. Rates are averages."""

    jobs: int | None = None
    adapter_slots: int | None = None
    tokens_per_second: float | None = None
    trainer_seconds_per_hour: float | None = None
    storage: QuantityText | None = None


class JobDocument(JobMessage):
    """A job as it is to run; KV `jobs`. The operator or `marlaas run` writes it; every worker re-reads it.

    created_at: unix seconds; the order of the queue. It is 0 in documents of older writers, which therefore go first.
    deleted: the orchestrator has to stop the job and remove its data; it removes this key last. verdict: the
    orchestrator has to end the job as failed.
    """

    generation: int = 1
    created_at: float = 0.0
    pool: str
    tenant: str
    tenant_weight: float = 1.0
    tenant_quota: TenantQuota = TenantQuota()
    seed: int = 0
    spec: JobSpec
    deleted: bool = False
    verdict: JobVerdict | None = None
    hold: JobHold | None = None

    @property
    def is_held(self) -> bool:
        """Whether the job may not be admitted now, because its pods are refused."""
        return self.hold is not None and self.hold.active

    def pool_of(self, agent: AgentSettings) -> str:
        """Return the pool on which an agent runs: its own, or the job's."""
        return agent.pool_ref.name if agent.pool_ref else self.pool

    @property
    def pools(self) -> frozenset[str]:
        """Names of the pools that serve the job's agents."""
        return frozenset(self.pool_of(agent) for agent in self.spec.agents)

    @property
    def queue(self) -> str:
        """The pool in whose queue the job waits: its own, or if no agent runs there, the first of its agents'."""
        return self.pool if self.pool in self.pools else min(self.pools)

    def agents_on(self, pool: str) -> tuple[AgentSettings, ...]:
        """Return the job's agents with a policy of their own that run on a pool."""
        return tuple(agent for agent in self.spec.policies if self.pool_of(agent) == pool)

    def num_pinned_on(self, pool: str) -> int:
        """Return the number of agents on a pool that need adapter slots: each policy, and each player of past versions."""
        pinned = (agent for agent in self.spec.agents if agent.pinned_as == agent.name)
        return sum(self.pool_of(agent) == pool for agent in pinned)

    def pool_text(self, pool: str) -> str:
        """Return a pool's name for a message; if the job has several pools, with the names of its agents there."""
        agents = [agent.name for agent in self.agents_on(pool)]
        return f"{pool} (agent{'s' if len(agents) > 1 else ''} {', '.join(agents)})" if len(self.pools) > 1 else pool


@dataclass(frozen=True, slots=True)
class JobAgent:
    """An agent of a job's document, with the names of its bus and blob objects."""

    document: JobDocument
    agent: AgentSettings

    @property
    def ref(self) -> JobRef:
        """The job's reference."""
        return self.document.ref

    @property
    def agent_ref(self) -> AgentRef:
        """The agent's reference. A later job of the same name has the same policy key, and another reference."""
        return AgentRef(self.ref, self.agent.name)

    @property
    def policy_key(self) -> str:
        """Key of its policy record."""
        return subjects.policy_key(self.ref.namespace, self.ref.name, self.agent.name)

    @property
    def fault_key(self) -> str:
        """Key of its fault in the report of a trainer."""
        return f"{self.ref.uid}.{self.agent.name}"

    @property
    def generations(self) -> tuple[str, ...]:
        """Subjects of generation requests for its policy: its own, and one of each further agent that plays the policy."""
        players = self.document.spec.players(self.agent.name)
        return tuple(subjects.generation(self.ref.namespace, self.ref.name, player.name) for player in players)

    @property
    def log(self) -> str:
        """Subject of its job's log, in the stream GROUPS."""
        return subjects.job_log(self.ref.namespace, self.ref.name)

    def adapter(self, version: int) -> AdapterRef:
        """Return the identity of one of its versions."""
        return self.agent_ref.adapter(version)


def agents_on(pool: str, document: JobDocument) -> Iterator[JobAgent]:
    """Return the job's agents with a policy of their own that run on a pool, with their names on the bus."""
    return (JobAgent(document, agent) for agent in document.agents_on(pool))


_ASIDE = frozenset({"priority", "suspend", "active_deadline_seconds", "export", "adapter_retention"})
"""Fields of a job's spec that affect neither episodes nor training.

A change of any other field, including fields added later, restarts the job's loop.
"""
_LOOP = tuple(name for name in JobSpec.model_fields if name not in _ASIDE)


def concerns_loop(before: JobDocument, after: JobDocument) -> bool:
    """Whether a change of a job's document requires the orchestrator and the trainer to restart their work on the job.

    Changes of priority, times, limits, the tenant, its weight and its quota do not: the orchestrator re-reads them while the job
    runs. Fields that stop the job (`suspend`, `deleted`, `verdict`, `hold`) are not compared here.
    """
    return before is not after and _loop(before) != _loop(after)


def _loop(document: JobDocument) -> tuple[object, ...]:
    fixed = (document.namespace, document.job, document.uid, document.pool, document.seed)
    return (*fixed, *(getattr(document.spec, name) for name in _LOOP))


class Phase(StrEnum):
    """Phase of a job. The last two are final."""

    QUEUED = "Queued"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def final(self) -> bool:
        """Whether the phase is final."""
        return self in (Phase.SUCCEEDED, Phase.FAILED)


class AgentProgress(BusMessage):
    """One agent's part of a job's progress.

    The fields have the meaning of those of `Progress`. reward: None if the last step's tasks may not call it. untrained: number of
    finished steps without a new version of the agent's policy, by their main `UntrainedCause`.
    """

    reward: float | None = None
    eval_before: float | None = None
    eval_last: float | None = None
    staleness: float = 0.0
    untrained: dict[str, int] = Field(default_factory=dict)


class SuiteProgress(BusMessage):
    """A suite's mean reward at version 0, and its result at the newest evaluated version, without metrics."""

    before: float | None = None
    last: SuiteResult


class Progress(JobMessage):
    """Last published state of a job; KV `progress`. The orchestrator writes it; the operator or `marlaas run` reads it."""

    generation: int = 1
    phase: Phase
    admitted: bool
    reason: str
    """CamelCase, for machines."""
    reason_at: float | None = None
    """Time since which an admitted job has the reason."""
    message: str = ""
    """Current activity and advice, for people."""
    step: int = 0
    """Finished steps."""
    steps: int
    versions: dict[str, int] = Field(default_factory=dict)
    promoted: dict[str, int] = Field(default_factory=dict)
    """By agent, the version that a succeeded job publishes."""
    adapters: dict[str, str] = Field(default_factory=dict)
    """By agent, the folder in the blob store of its newest or promoted version."""
    reward: float | None = None
    """Mean of the last step."""
    eval_before: float | None = None
    eval_last: float | None = None
    staleness: float = 0.0
    """Mean of the last step."""
    tokens: int = 0
    """From the replicas' own counts, as `accelerator_s`."""
    tokens_per_s: float = 0.0
    accelerator_s: float = 0.0
    counted: dict[str, tuple[int, float]] = Field(default_factory=dict)
    """By `<pool>/<replica>`, the replica's own totals that `tokens` and `accelerator_s` contain, for the next orchestrator."""
    num_preemptions: int = 0
    """Of the job."""
    preempted_tokens: int = 0
    """From the replicas' own counts, of generations that preemptions cancelled, as `preempted_engine_s`."""
    preempted_engine_s: float = 0.0
    counted_preempted: dict[str, tuple[int, float]] = Field(default_factory=dict)
    """As `counted`."""
    cut_tokens: int = 0
    """Of recorded turns in plays that preemptions cut, as counted at each preemption, as `cut_engine_s`. `usage` has them too once
    their group is decided, and the larger number counts.
    """
    cut_engine_s: float = 0.0
    counted_slots: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Of the slot seconds in `usage`, by agent and replica."""
    trainer_s: float = 0.0
    """Seconds that trainers computed for recorded steps."""
    num_outstanding: int = 0
    skipped_solved: int = 0
    """Visits to tasks that were skipped because they were always right."""
    skipped_hopeless: int = 0
    """Those that were always wrong."""
    faults: dict[str, int] = Field(default_factory=dict)
    training_faults: dict[str, int] = Field(default_factory=dict)
    """Problems in training that cost no step, by class. `out-of-memory`: steps repeated with a lower token budget. `non-finite`:
    updates without effect.
    """
    started_at: float | None = None
    admitted_s: float = 0.0
    """Total seconds for which the job has been admitted."""
    admitted_at: float | None = None
    """Time of the last admission."""
    finished_at: float | None = None
    at: float = 0.0
    tenant: str = ""
    """To which the job is accounted."""
    usage: dict[str, UsageAmounts] = Field(default_factory=dict)
    """By agent, of finished steps and evaluations, with the seconds of its slots and its stored bytes up to now."""
    agents: dict[str, AgentProgress] = Field(default_factory=dict)
    """Reward, staleness and evaluations by agent."""
    warnings: dict[str, str] = Field(default_factory=dict)
    """By reason, a sentence about each figure of the last step or evaluation that is out of its bounds
    (`orchestrator/diagnosis.py`).
    """
    suites: dict[str, SuiteProgress] = Field(default_factory=dict)
    """Of the evaluation, if the job has named ones."""

    @property
    def published(self) -> dict[str, int]:
        """By agent, the version that the job publishes: the promoted one, else the newest."""
        return self.versions | self.promoted

    @property
    def end_mark(self) -> str:
        """Phase, step and number of steps of a job in a final phase, such as `Succeeded 40/40`; else empty. Names this end of the job.

        A job that is given more steps after its end has another mark at its next end.
        """
        return self.rest_mark if self.phase.final else ""

    @property
    def rest_mark(self) -> str:
        """Like `end_mark`, but also for a suspended job, such as `Suspended 12/40`; empty in all other phases."""
        rests = self.phase.final or self.phase is Phase.SUSPENDED
        return f"{self.phase} {self.step}/{self.steps}" if rests else ""

    @property
    def generated_tokens(self) -> int:
        """Tokens that the engines generated for the job, or that its records have if these are more."""
        return max(self.tokens, sum(amounts.generated_tokens for amounts in self.usage.values()))

    @property
    def stored_bytes(self) -> int:
        """Bytes of all versions of the job's adapters and of the kept training states in the blob store."""
        return sum(amounts.stored_bytes for amounts in self.usage.values())

    @property
    def amounts(self) -> UsageAmounts:
        """The job's usage.

        Tokens that the engines generated and no record has were cut by a preemption, or are open. Once the job has ended,
        the latter are unrecorded.
        """
        recorded = total(self.usage.values())
        rest = self.generated_tokens - recorded.generated_tokens
        undecided = max(0, self.cut_tokens - recorded.preempted_tokens)
        cut = min(self.preempted_tokens + undecided, rest)
        other = TokenUse.UNRECORDED if self.phase.final else TokenUse.OPEN
        return self.completed(recorded + UsageAmounts.generated({TokenUse.PREEMPTED: cut, other: rest - cut}))

    def completed(self, recorded: UsageAmounts) -> UsageAmounts:
        """Return the recorded amounts with those that are known for the job as a whole.

        Engine seconds are those that the replicas reported, or those of its recorded turns if these are more, after a kill.
        """
        engine_s = max(self.accelerator_s, recorded.engine_s)
        own = total(self.usage.values())
        cut_s = self.preempted_engine_s + max(self.cut_engine_s, own.preempted_engine_s)
        of_job = {
            "engine_s": engine_s,
            "preempted_engine_s": max(0.0, min(cut_s, engine_s - own.charged_engine_s)),
            "slot_s": sum(amounts.slot_s for amounts in self.usage.values()),
            "trainer_s": self.trainer_s,
            "admitted_s": self.admitted_s,
            "stored_bytes": self.stored_bytes,
        }
        return recorded.model_copy(update=of_job)


class PastUses(BusMessage):
    """Decayed use of the pools by tenant; KV `tenants`, key `past-use`. The orchestrator writes it for its successor.

    at: unix seconds up to which it is computed.
    """

    use: dict[str, float] = Field(default_factory=dict)
    at: float = 0.0


class JobEvent(JobMessage):
    """A sentence for `kubectl describe`; stream EVENTS. No component depends on it."""

    role: str
    at: float
    reason: str
    message: str
