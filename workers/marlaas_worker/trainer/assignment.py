"""Agents that a pool's trainers have to train, what they cost, and the rules for taking an agent's lease, as functions of values.

`versions.PolicyKey.bind` writes the lease.

The cost of an agent is the share of a trainer's time that it has used recently; agents are placed on trainers by it. Each trainer
reports, for every agent that it has or had, the seconds of computation and the seconds for which the agent was bound; both count half
after ten minutes. So the cost of an agent that moves does not change: the sums over all trainers stay the same. Steps may take minutes;
with a shorter half-life an agent would seem idle between two steps.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from marlaas_api import subjects
from marlaas_api.messages import JobAgent, JobDocument, PolicyRecord, Progress, agents_on, concerns_loop
from marlaas_api.messages.training_settings import TrainingSettings

LEASE_GRACE_S = 6.0
"""Seconds that a holder's report must be missing before its lease is free: three report intervals, after the report's lifetime.

After an outage of the bus all reports are gone at once; the grace period keeps the leases of running trainers.
"""
WORK_HALF_LIFE_S = 600.0
PRIOR_S = 60.0
"""An agent's cost is computed as if it had also been bound for this many seconds at the mean cost of all agents.

So a new agent, which has no measurements, has the mean cost.
"""
MIN_PART = 0.1
"""Least cost of an agent, as a fraction of the mean cost: an idle agent may become busy at any time."""

Work = Mapping[str, tuple[float, float]]
"""By policy key: recent seconds of the agent's computation, and recent seconds for which the agent was bound."""


@dataclass(frozen=True, slots=True)
class Assignment(JobAgent):
    """An agent that a pool's trainers have to train."""

    @property
    def consumer(self) -> str:
        """Name of the durable consumer of the agent's groups."""
        return subjects.consumer(self.ref.namespace, self.ref.name, self.agent.name, "trainer")

    @property
    def training(self) -> TrainingSettings:
        """The agent's training settings."""
        return self.document.spec.training_of(self.agent)

    def training_at(self, step: int) -> TrainingSettings:
        """Return the settings of a step: those of supervised fine-tuning in the first `initFrom.sft.steps` steps, else the agent's."""
        sft = self.document.spec.sft_of(self.agent)
        return sft if sft is not None and step < sft.steps else self.training

    def is_as(self, other: "Assignment | None") -> bool:
        """Return whether the other assignment requests the same training.

        If it does, the agent's task need not restart, even if the job was edited.
        """
        return (
            other is not None
            and self.policy_key == other.policy_key
            and not concerns_loop(self.document, other.document)
        )

    def is_complete(self, record: PolicyRecord | None) -> bool:
        """Return whether nothing is left to train: the agent is frozen and its version 0 exists."""
        has_version = record is not None and record.uid == self.ref.uid and record.manifest is not None
        return has_version and not self.agent.trainable


def assignments(documents: Iterable[JobDocument], progress: Mapping[str, Progress], pool: str) -> dict[str, Assignment]:
    """Return the agents of admitted, unfinished jobs on this pool, by policy key. progress: by job key. pool: the pool's name."""
    return _of(pool, documents, progress, lambda known: known.admitted and not known.phase.final)


def ended_assignments(
    documents: Iterable[JobDocument], progress: Mapping[str, Progress], pool: str
) -> dict[str, Assignment]:
    """Return the agents of ended jobs on this pool, by policy key; those of jobs that are being deleted are left out.

    Args as `assignments`.
    """
    return _of(pool, documents, progress, lambda known: known.phase.final)


def _of(
    pool: str,
    documents: Iterable[JobDocument],
    progress: Mapping[str, Progress],
    is_chosen: Callable[[Progress], bool],
) -> dict[str, Assignment]:
    found: dict[str, Assignment] = {}
    for document in documents:
        known = progress.get(document.ref.key)
        if known is not None and known.uid == document.uid and not document.deleted and is_chosen(known):
            made = (Assignment(document, one.agent) for one in agents_on(pool, document))
            found |= {assignment.policy_key: assignment for assignment in made}
    return found


def bound_record(current: PolicyRecord | None, uid: str, holder: str) -> PolicyRecord:
    """Return the record that a bind writes: the epoch is incremented; a new job of the same name starts from an empty record.

    Args:
        current: the record to continue; None: the agent has no policy key.
        uid: the job's.
        holder: name of the trainer that takes the lease.
    """
    epoch = 0 if current is None else current.epoch + 1
    if current is None or current.uid != uid:
        return PolicyRecord(uid=uid, epoch=epoch, holder=holder)
    return current.model_copy(update={"epoch": epoch, "holder": holder})


@dataclass(slots=True)
class Absences:
    """For each lease holder without a live report, the time of the first read that found none, by the observer's clock."""

    _since: dict[str, float] = field(default_factory=dict)

    def observe(self, holders: Iterable[str], live: Iterable[str], now: float) -> None:
        """Record a successful read of the reports. holders: trainers with a lease. live: trainers with a report. now: in seconds."""
        absent = set(holders) - set(live)
        self._since = {holder: self._since.get(holder, now) for holder in absent}

    def gone(self, holder: str, now: float) -> bool:
        """Return whether a holder has had no live report for at least LEASE_GRACE_S. now: in seconds, of the same clock as for `observe`."""
        return holder in self._since and now - self._since[holder] >= LEASE_GRACE_S


def may_bind(current: PolicyRecord | None, uid: str, name: str, holder_gone: bool) -> bool:
    """Return whether the trainer `name` may take an agent's lease: no trainer holds it for this job, `name` holds it, or its holder is gone.

    Args:
        current: the agent's policy record; None: there is none.
        uid: the job's. A record of another job of the same name is no obstacle.
        holder_gone: whether the record's holder is gone (`Absences.gone`).
    """
    if current is None or current.uid != uid:
        return True
    return current.holder in ("", name) or holder_gone


@dataclass(slots=True)
class RecentWork:
    """Recent seconds of computation, and of being bound, of one agent on one trainer. Each second counts half after WORK_HALF_LIFE_S.

    The caller passes the time, in seconds.
    """

    at: float
    """Time of the last call of `advance`, or of the creation."""
    computed_s: float = 0.0
    """Recent seconds of the agent's computation."""
    bound_s: float = 0.0
    """Recent seconds for which the agent was bound."""
    _total_s: float = 0.0

    def advance(self, total_s: float, is_bound: bool, now: float) -> tuple[float, float]:
        """Count the time since the last call; return the recent seconds of computation, and for which the agent was bound.

        total_s: seconds of the agent's computation since the trainer's start. is_bound: whether the agent is bound now.
        """
        elapsed_s = now - self.at
        remaining = 0.5 ** (elapsed_s / WORK_HALF_LIFE_S)
        self.computed_s = self.computed_s * remaining + total_s - self._total_s
        self.bound_s = self.bound_s * remaining + (elapsed_s if is_bound else 0.0)
        self._total_s = total_s
        self.at = now
        return round(self.computed_s, 3), round(self.bound_s, 3)


def recent_costs(agents: Collection[str], reported: Iterable[Work]) -> dict[str, float]:
    """Return the cost of each agent, by policy key: seconds of computation per second of being bound; 1 for all if nothing was computed.

    Args:
        agents: policy keys.
        reported: the work that each trainer reports.
    """
    busy = dict.fromkeys(agents, 0.0)
    bound = dict.fromkeys(agents, 0.0)
    for work in reported:
        for key in busy.keys() & work.keys():
            busy[key] += work[key][0]
            bound[key] += work[key][1]
    total_s = sum(bound.values())
    if not total_s or not any(busy.values()):
        return dict.fromkeys(agents, 1.0)
    mean = sum(busy.values()) / total_s
    return {key: max((busy[key] + PRIOR_S * mean) / (bound[key] + PRIOR_S), MIN_PART * mean) for key in agents}
