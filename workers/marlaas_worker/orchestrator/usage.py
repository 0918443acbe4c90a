"""Usage of a job: tokens, rates and accelerator seconds from the replicas' running totals, and times of admission.

The turns tell the use of their tokens (`metering`). Only the totals contain generations that were cancelled or failed, and slot seconds. Such generations are not recorded one by one. A record would be lost if its replica stops while NATS is unavailable, and
could arrive after the decision on its group or the end of its job. A total is in every report, so a lost report loses nothing, and it is
current before a group is decided, which the rates of tenants need.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from marlaas_api.messages import Progress, ReplicaReport, UsageAmounts
from marlaas_api.messages.usage import merged


@dataclass(slots=True)
class RunningTotal:
    """Sum over replicas of a total that each of them reports, and that restarts from zero when the replica restarts.

    Attributes:
        total: the sum. It only grows.
        counted: by replica (`<pool>/<name>`), the part of its present total that `total` contains.
        since_seen: whether `total` leaves out the value of a replica's first report, and counts only the growth since then.
    """

    total: float = 0.0
    counted: dict[str, float] = field(default_factory=dict)
    since_seen: bool = False

    def see(self, replica: str, value: float) -> None:
        """Add the growth of a replica's total since its last report. value: the total since the replica started."""
        before = self.counted.get(replica, value if self.since_seen else 0.0)
        self.total += value - before if value >= before else value
        self.counted[replica] = value


@dataclass(slots=True)
class JobUsage:
    """Tokens, seconds of engines and slots, and recorded bytes of one job, over all replicas of its pools.

    Attributes:
        uid: the job's uid.
        window_s: seconds over which `tokens_per_s` is averaged.
        tokens: generated tokens.
        engine_s: seconds of engines.
        preempted_tokens: the part of `tokens` in generations that were cancelled after a preemption of the job.
        preempted_engine_s: the part of `engine_s` in such generations.
        slot_s: seconds of adapter slots, by agent.
        turn_bytes: bytes of recorded turns, since this orchestrator first saw each replica.
    """

    uid: str
    window_s: float = 15.0
    tokens: RunningTotal = field(default_factory=RunningTotal)
    engine_s: RunningTotal = field(default_factory=RunningTotal)
    preempted_tokens: RunningTotal = field(default_factory=RunningTotal)
    preempted_engine_s: RunningTotal = field(default_factory=RunningTotal)
    slot_s: dict[str, RunningTotal] = field(default_factory=dict)
    turn_bytes: RunningTotal = field(default_factory=lambda: RunningTotal(since_seen=True))
    _points: deque[tuple[float, float]] = field(default_factory=deque)

    @classmethod
    def of(cls, uid: str, before: Progress | None) -> "JobUsage":
        """Return the usage of a job, continued from its published progress.

        Usage since that progress was written counts too, because the progress has, for each replica, how much of the replica's total it
        includes. Usage is lost only of a replica that was restarted before this orchestrator read its report.

        before: the published progress; None: start from zero.
        """
        if before is None:
            return cls(uid)
        tokens, seconds = _apart(before.counted)
        cut_tokens, cut_seconds = _apart(before.counted_preempted)
        return cls(
            uid,
            tokens=RunningTotal(before.tokens, tokens),
            engine_s=RunningTotal(before.accelerator_s, seconds),
            preempted_tokens=RunningTotal(before.preempted_tokens, cut_tokens),
            preempted_engine_s=RunningTotal(before.preempted_engine_s, cut_seconds),
            slot_s={
                agent: RunningTotal(before.usage[agent].slot_s, dict(counted))
                for agent, counted in before.counted_slots.items()
            },
        )

    def see(self, reports: list[ReplicaReport], now: float) -> None:
        """Update the totals from the reports of all replicas. now: seconds of any clock, for the rate."""
        for report in reports:
            if report.role == "rollout":
                replica = f"{report.pool}/{report.replica}"
                self.tokens.see(replica, report.job_tokens.get(self.uid, 0))
                self.engine_s.see(replica, report.job_engine_s.get(self.uid, 0.0))
                self.preempted_tokens.see(replica, report.job_preempted_tokens.get(self.uid, 0))
                self.preempted_engine_s.see(replica, report.job_preempted_engine_s.get(self.uid, 0.0))
                slot_s = report.agent_slot_s.get(self.uid, {})
                for agent in {*self.slot_s, *slot_s}:
                    self.slot_s.setdefault(agent, RunningTotal()).see(replica, slot_s.get(agent, 0.0))
                self.turn_bytes.see(replica, report.job_turn_bytes.get(self.uid, 0))
        self._points.append((now, self.tokens.total))
        while self._points and now - self._points[0][0] > self.window_s:
            self._points.popleft()

    def with_slots(self, usage: Mapping[str, UsageAmounts]) -> dict[str, UsageAmounts]:
        """Return `usage`, which is by agent, with the seconds of each agent's slots added."""
        return merged(usage, {agent: UsageAmounts(slot_s=one.total) for agent, one in self.slot_s.items()})

    def totals(self) -> dict[str, Any]:
        """Return the job's total usage as fields of `Progress`.

        The `counted…` fields hold, by replica (`<pool>/<name>`), how much of its running total is included. So the next orchestrator
        counts nothing twice.
        """
        return {
            "tokens": int(self.tokens.total),
            "tokens_per_s": self.tokens_per_s(),
            "accelerator_s": self.engine_s.total,
            "counted": _together(self.tokens, self.engine_s),
            "preempted_tokens": int(self.preempted_tokens.total),
            "preempted_engine_s": self.preempted_engine_s.total,
            "counted_preempted": _together(self.preempted_tokens, self.preempted_engine_s),
            "counted_slots": {
                agent: {name: seconds for name, seconds in one.counted.items() if seconds}
                for agent, one in self.slot_s.items()
            },
        }

    def tokens_per_s(self) -> float:
        """Return the generated tokens per second over the last `window_s` seconds; 0 if `see` was called fewer than two times in them."""
        if len(self._points) < 2:
            return 0.0
        (start, before), (end, after) = self._points[0], self._points[-1]
        return (after - before) / (end - start) if end > start else 0.0


def _apart(counted: Mapping[str, tuple[int, float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Split (tokens, seconds) by replica into the tokens by replica and the seconds by replica."""
    tokens = {name: float(number) for name, (number, _) in counted.items()}
    return tokens, {name: seconds for name, (_, seconds) in counted.items()}


def _together(tokens: RunningTotal, seconds: RunningTotal) -> dict[str, tuple[int, float]]:
    """Return by replica the tokens and seconds that the job's totals contain of it; without the replicas that have none."""
    names = (name for name, number in tokens.counted.items() if number or seconds.counted[name])
    return {name: (int(tokens.counted[name]), seconds.counted[name]) for name in names}


LATE_S = 10.0
"""Longest time, in seconds, between the end of a job and the replicas' reports of its last use."""


def has_just_ended(progress: Progress, now: float) -> bool:
    """Return whether a job has ended so recently that replicas may still report use of it. now: unix seconds."""
    return progress.phase.final and now - (progress.finished_at or 0.0) <= LATE_S


def with_late_use(progress: Progress, reports: list[ReplicaReport], now: float) -> Progress:
    """Return the progress of a job that has just ended, with the use that replicas have reported since its last write. now: unix seconds."""
    usage = JobUsage.of(progress.uid, progress)
    usage.see(reports, now)
    recorded = {agent: used.model_copy(update={"slot_s": 0.0}) for agent, used in progress.usage.items()}
    told = {"tokens_per_s": progress.tokens_per_s, "usage": usage.with_slots(recorded)}
    return progress.model_copy(update=usage.totals() | told)


@dataclass(frozen=True, slots=True)
class AdmittedTime:
    """Times of a job's admissions, unix seconds, how often the job was preempted, and the usage of the plays that its preemptions cut.

    Attributes:
        started_at: its first admission.
        admitted_at: its last admission.
        counted_from: `now` minus this is the total time for which it was admitted; a restart of its loop loses up to one second.
        num_preemptions: how often it was preempted.
        cut_tokens: generated tokens of the plays that preemptions cut, as in its `Progress`.
        cut_engine_s: engine seconds of these plays, as in its `Progress`.
    """

    started_at: float
    admitted_at: float
    counted_from: float
    num_preemptions: int = 0
    cut_tokens: int = 0
    cut_engine_s: float = 0.0

    @classmethod
    def of(cls, before: Progress | None, now: float) -> "AdmittedTime":
        """Return the times of a job that is admitted now, or already was by its published progress. before: this progress; None: first admission."""
        if before is None:
            return cls(now, now, now)
        since = before.admitted_at if before.admitted and before.admitted_at is not None else now
        cut = before.cut_tokens, before.cut_engine_s
        return cls(before.started_at or now, since, now - before.admitted_s, before.num_preemptions, *cut)

    def as_of(self, now: float) -> dict[str, Any]:
        """Return the fields of `Progress` about the job's admissions."""
        return {
            "started_at": self.started_at,
            "admitted_at": self.admitted_at,
            "admitted_s": self.total_s(now),
            "num_preemptions": self.num_preemptions,
            "cut_tokens": self.cut_tokens,
            "cut_engine_s": self.cut_engine_s,
        }

    def total_s(self, now: float) -> float:
        """Return the total seconds of admission."""
        return now - self.counted_from
