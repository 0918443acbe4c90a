"""Order in which agents' work goes to the compute thread: a fair queue of seconds. Pure; uses no clock.

Tenants share the thread by weight, a tenant's jobs share its part, and a job's agents share the job's (`fair_queue`). Work
is charged by its tokens and the recent seconds per token, and corrected by its real time. An agent with groups that are not
committed yet counts as an open episode, so that waiting for the rest of a step does not erase its credit.

The agent that computed last keeps the turn for up to `quantum_s` while it has more work, so that it finishes its step
instead of alternating with all others. For the queue's bound, the largest cost is then the quantum and one micro-batch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from marlaas_worker.fair_queue import FairQueue, Path, Ticket

QUANTUM_S = 0.25
CREDIT_S = 60.0
"""Most seconds of credit that all tenants together keep while they wait for groups. It is more than a step of most jobs computes, and
small enough that an agent whose groups hang for hours does not occupy the thread for long afterwards.
"""
_NEWEST = 0.1
"""Weight of the newest measurement in the moving averages of `_Estimate`."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class ComputeAccount:
    """One agent's account, to which its work is charged."""

    tenant: str = ""
    """The job's tenant; empty for work that is done for no job."""
    job: str = ""
    """The job's uid."""
    agent: str = ""
    """The agent's policy key."""
    busy_s: float = 0.0
    """Seconds of the agent's work so far."""

    @property
    def path(self) -> Path:
        """Names of the account in the fair queue, from the tenant down."""
        return self.tenant, self.job, self.agent


@dataclass(slots=True)
class _Estimate:
    """Exponential moving average of seconds, per token or per piece of work."""

    seconds: float

    def learn(self, seconds: float) -> None:
        self.seconds += _NEWEST * (seconds - self.seconds)


class ComputeQueue(Generic[T]):
    """Fair queue of work for the compute thread. Each piece of work carries an item of the caller (T).

    Call `settle` for every ticket that `next` has returned, and `withdraw` for one that shall not run.

    quantum_s: seconds for which one agent keeps its turn while it has more work.
    """

    def __init__(self, quantum_s: float = QUANTUM_S) -> None:
        self._quantum_s = quantum_s
        self._queue: FairQueue[tuple[ComputeAccount, int, T]] = FairQueue(max_credit=CREDIT_S)
        self._weights: dict[str, float] = {}
        self._by_agent: dict[str, list[Ticket[tuple[ComputeAccount, int, T]]]] = {}
        self._holding: set[ComputeAccount] = set()
        self._resident = ""
        """Policy key of the agent that has the turn."""
        self._resident_s = 0.0
        self._per_token = _Estimate(1e-4)
        self._per_work = _Estimate(1e-2)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Set the weights of all tenants for later work. A tenant that is left out keeps its weight until it is idle, and then has 1.

        A weight that is not positive and finite is ignored: the tenant keeps its last valid one.
        """
        valid = {tenant: weight for tenant, weight in weights.items() if weight > 0 and math.isfinite(weight)}
        known = self._weights | valid
        self._weights = {tenant: known[tenant] for tenant in weights if tenant in known}

    def usage(self, tenant: str) -> float:
        """Return a tenant's usage in the fair queue: seconds of its work divided by its weight.

        It is raised when the tenant returns from an idle time, because idle times earn no credit (`fair_queue`).
        """
        return self._queue.usage(tenant)

    def hold(self, account: ComputeAccount, has_groups: bool) -> None:
        """Record whether an agent has groups that are not committed yet, and so keeps its credit while it waits. May be repeated."""
        if has_groups and account not in self._holding:
            self._holding.add(account)
            self._queue.open(account.path, self._weights.get(account.tenant))
        elif account in self._holding and not has_groups:
            self._holding.remove(account)
            self._queue.close(account.path)

    def push(self, account: ComputeAccount, item: T, num_tokens: int = 0) -> Ticket[tuple[ComputeAccount, int, T]]:
        """Queue work, and return its ticket, which carries `item`. num_tokens: tokens of the work; 0 if its time does not depend on tokens."""
        cost = num_tokens * self._per_token.seconds if num_tokens else self._per_work.seconds
        weight = self._weights.get(account.tenant)
        ticket = self._queue.push(account.path, (account, num_tokens, item), cost=cost, weight=weight)
        self._by_agent.setdefault(account.agent, []).append(ticket)
        return ticket

    def next(self) -> Ticket[tuple[ComputeAccount, int, T]] | None:
        """Take the work that runs next from the queue, and return its ticket; None if no work waits."""
        waiting = self._by_agent.get(self._resident)
        if waiting and self._resident_s < self._quantum_s:
            return self._taken(self._queue.take(waiting[0]))
        ticket = self._queue.pop()
        if ticket is None:
            return None
        self._resident, self._resident_s = ticket.item[0].agent, 0.0
        return self._taken(ticket)

    def settle(self, ticket: Ticket[tuple[ComputeAccount, int, T]], seconds: float) -> None:
        """End work that `next` returned, and charge the seconds that it took; 0 if it did not run."""
        account, num_tokens, _ = ticket.item
        self._queue.settle(ticket, seconds)
        if account.agent == self._resident:
            self._resident_s += seconds
        if seconds and num_tokens:
            self._per_token.learn(seconds / num_tokens)
        elif seconds:
            self._per_work.learn(seconds)

    def withdraw(self, ticket: Ticket[tuple[ComputeAccount, int, T]]) -> None:
        """Remove work that still waits from the queue; it is charged nothing."""
        self._queue.remove(ticket)
        self._taken(ticket)

    def _taken(self, ticket: Ticket[tuple[ComputeAccount, int, T]]) -> Ticket[tuple[ComputeAccount, int, T]]:
        agent = ticket.item[0].agent
        self._by_agent[agent].remove(ticket)
        if not self._by_agent[agent]:
            del self._by_agent[agent]
        return ticket
