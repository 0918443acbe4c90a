"""The account that each request is charged to, open episodes by account, and the tokens that tenants use on other replicas. Pure."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from marlaas_api.messages import JobDocument
from marlaas_worker.fair_queue import FairQueue, Path

OPEN_S = 60.0
"""Seconds for which an episode counts as open after its last request has ended, because its end is not reported to this role.

Longer than nearly all tool calls. A long time does no harm: the tenant of an open episode keeps its credit in the queue, but never more
than its share of `max_credit` (`fair_queue`), however long the tenant sends no request.
"""


@dataclass(frozen=True, slots=True)
class Account:
    """Tenant, job and agent that a request is charged to.

    Attributes:
        tenant: name of the tenant.
        weight: the tenant's share of the engine, relative to the weights of other tenants.
        job: uid of the job.
        agent: name of the agent; empty if the job has one agent.
    """

    tenant: str
    weight: float
    job: str
    agent: str = ""

    @property
    def path(self) -> Path:
        """Names of the account in the fair queue: tenant and job, and the agent if the job has several."""
        return (self.tenant, self.job, self.agent) if self.agent else (self.tenant, self.job)


def account_of(document: JobDocument, agent: str) -> Account:
    """Return the account that an agent's requests are charged to. document: of the agent's job. agent: its name."""
    name = agent if len(document.spec.agents) > 1 else ""
    return Account(document.tenant, document.tenant_weight, document.uid, name)


@dataclass(slots=True)
class _Open:
    """An agent's part of an open episode. path: of the agent's account. num_requests: the part's requests that are in this role now."""

    path: Path
    num_requests: int = 0


class OpenEpisodes:
    """Episodes that have requests in the role, or had one in the last `OPEN_S` seconds. Each agent counts as an episode of its own.

    queue: the fair queue in which an episode's account is active while the episode is open. clock: returns the time in seconds.
    """

    def __init__(self, queue: FairQueue[Any], clock: Callable[[], float]) -> None:
        self._queue, self._clock = queue, clock
        self._open: dict[tuple[str, str], _Open] = {}
        self._ended_at: OrderedDict[tuple[str, str], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def request(self, account: Account, episode: str) -> Iterator[None]:
        """Count a request's episode as open while the context is open, whatever the request waits for, and for `OPEN_S` after.

        account: the one that the request is charged to. episode: name of the request's episode.
        """
        self.close_old()
        key = episode, account.agent
        if key not in self._open:
            self._queue.open(account.path, account.weight)
            self._open[key] = _Open(account.path)
        self._open[key].num_requests += 1
        self._ended_at.pop(key, None)
        try:
            yield
        finally:
            self._open[key].num_requests -= 1
            if not self._open[key].num_requests:
                self._ended_at[key] = self._clock()

    def close_old(self) -> None:
        """Close the episodes whose last request ended more than `OPEN_S` ago."""
        now = self._clock()
        while self._ended_at and next(iter(self._ended_at.values())) < now - OPEN_S:
            key, _ = self._ended_at.popitem(last=False)
            self._queue.close(self._open.pop(key).path)


class OtherReplicas:
    """Computes the tokens that tenants use on other replicas from the running totals in the reports of those replicas.

    The first report of a replica adds no tokens: its totals include tokens from before this process started, or tokens that were charged
    already, if the report was gone for a while. If a total is below that of the previous report, the replica was restarted, or the report
    is an old one. Such a total adds no tokens, and the next total is compared with it. So after an old report, and only then, some tokens
    count twice: those that the old total lacks.
    """

    def __init__(self) -> None:
        self._totals: dict[str, dict[str, int]] = {}

    def growth(self, replica: str, totals: Mapping[str, int]) -> dict[str, int]:
        """Return the tokens that each tenant used since the replica's previous report; without tenants that used none.

        replica: key of the replica's report in the bucket `replicas`. totals: from its new report, the tokens by tenant since its start.
        """
        before, self._totals[replica] = self._totals.get(replica), dict(totals)
        if before is None:
            return {}
        grown = {tenant: total - before.get(tenant, 0) for tenant, total in totals.items()}
        return {tenant: tokens for tenant, tokens in grown.items() if tokens > 0}

    def drop(self, replica: str) -> None:
        """Drop the totals of a replica whose report is gone. replica: key of the report, as in `growth`."""
        self._totals.pop(replica, None)
