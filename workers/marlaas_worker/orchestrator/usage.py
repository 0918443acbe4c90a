"""Usage of a job for people: tokens, rates and accelerator seconds, from the replicas' running totals."""

from collections import deque
from dataclasses import dataclass, field

from marlaas_api.messages import ReplicaReport


@dataclass(slots=True)
class RunningTotal:
    """Sum of totals that restart from zero when their replica restarts.

    since_seen: do not count a replica's total at its first report.
    """

    total: float = 0.0
    since_seen: bool = False
    _last: dict[str, float] = field(default_factory=dict)

    def see(self, replica: str, value: float) -> None:
        """Note a replica's total since the replica's start."""
        before = self._last.get(replica, value if self.since_seen else 0.0)
        self.total += value - before if value >= before else value
        self._last[replica] = value


@dataclass(slots=True)
class JobUsage:
    """Tokens, engine seconds and recorded bytes of one job, over all replicas of its pool."""

    uid: str
    window_s: float = 15.0
    tokens: RunningTotal = field(default_factory=RunningTotal)
    engine_s: RunningTotal = field(default_factory=RunningTotal)
    turn_bytes: RunningTotal = field(default_factory=lambda: RunningTotal(since_seen=True))
    _points: deque[tuple[float, float]] = field(default_factory=deque)

    def see(self, reports: list[ReplicaReport], now: float) -> None:
        """Update the totals from the current reports."""
        for report in reports:
            if report.role == "rollout":
                self.tokens.see(report.replica, report.job_tokens.get(self.uid, 0))
                self.engine_s.see(report.replica, report.job_engine_s.get(self.uid, 0.0))
                self.turn_bytes.see(report.replica, report.job_turn_bytes.get(self.uid, 0))
        self._points.append((now, self.tokens.total))
        while self._points and now - self._points[0][0] > self.window_s:
            self._points.popleft()

    def tokens_per_s(self) -> float:
        """Return the rate over the window; 0 until two points are known."""
        if len(self._points) < 2:
            return 0.0
        (start, before), (end, after) = self._points[0], self._points[-1]
        return (after - before) / (end - start) if end > start else 0.0
