"""Weighted fair queue over tenants, and over jobs within a tenant. Pure; uses no clock.

Each tenant has a counter, its usage: the cost of its served requests divided by its weight. The queue serves the active
tenant with the smallest usage, and within it the active job with the smallest usage (VTC: Sheng et al., "Fairness in
Serving Large Language Models", OSDI 2024, section 4). Splitting its work into many jobs gains a tenant nothing.

- A tenant or job is active while it has open episodes, queued requests or requests in flight. So a tool call does not
  erase its credit.
- On activation its usage is lifted to the smallest usage of the active ones, or of the last one that was active. So an
  idle tenant saves up no credit.
- A request is charged an estimate when it is served, and its real cost when it has ended (`settle`).
- A request that does not fit the free room may be passed by others, for at most `max_passed` of room. Then the queue
  waits for it.

Bound: let tenants f and g have queued requests throughout an interval, without a pass. Then their services s in that interval
differ by |s_f/w_f - s_g/w_g| <= (C + E)(1/w_f + 1/w_g). C is the largest cost of a request; E is the largest sum of a
tenant's errors of estimates in flight (at the interval's start and now).
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Ticket(Generic[T]):
    """A request in the queue or in flight.

    Attributes:
        charged: cost that its tenant and job have been charged; before it is served, the estimate.
        size: room that it needs.
        is_queued: whether it waits in the queue.
    """

    tenant: str
    job: str
    item: T
    charged: float
    size: float
    is_queued: bool = False


@dataclass(slots=True, eq=False)
class _Account:
    """Usage of a tenant or job.

    Attributes:
        num_active: open episodes, queued requests and requests in flight; of a tenant, over all of its jobs.
    """

    usage: float = 0.0
    num_active: int = 0


class _Accounts:
    """Accounts of one level: tenants, or the jobs of one tenant."""

    def __init__(self) -> None:
        self._by_name: dict[str, _Account] = {}
        self._last = _Account()

    def __getitem__(self, name: str) -> _Account:
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def enter(self, name: str) -> None:
        """Count one more reason for the account to be active, and lift its usage on activation."""
        account = self._by_name.setdefault(name, _Account())
        if account.num_active == 0:
            account.usage = max(account.usage, self._floor())
        account.num_active += 1

    def leave(self, name: str) -> None:
        """Count one reason less."""
        account = self._by_name[name]
        account.num_active -= 1
        if account.num_active == 0:
            self._last = account
            self._drop_idle()

    def charge(self, name: str, usage: float) -> None:
        """Add usage; an account that was dropped is not charged."""
        if account := self._by_name.get(name):
            account.usage += usage

    def _floor(self) -> float:
        """Return the usage to which an account is lifted on activation."""
        active = [account.usage for account in self._by_name.values() if account.num_active]
        return min(active) if active else self._last.usage

    def _drop_idle(self) -> None:
        """Drop idle accounts that the next activation would lift anyway. Memory is then bounded by the active accounts."""
        floor = self._floor()
        for name in [name for name, one in self._by_name.items() if not one.num_active and one.usage <= floor]:
            del self._by_name[name]


@dataclass(slots=True, eq=False)
class _Tenant(Generic[T]):
    jobs: _Accounts = field(default_factory=_Accounts)
    queues: OrderedDict[str, deque[Ticket[T]]] = field(default_factory=OrderedDict)

    def heads(self) -> Iterator[Ticket[T]]:
        """Yield the first request of each job that has one, the job with the smallest usage first."""
        for job in sorted(self.queues, key=lambda job: self.jobs[job].usage):
            yield self.queues[job][0]


class FairQueue(Generic[T]):
    """The queue. Costs are in one unit throughout: tokens, or seconds.

    Args:
        max_passed: room that other requests may take while the first one does not fit.
    """

    def __init__(self, max_passed: float = 0.0) -> None:
        self.max_passed = max_passed
        self._weights: dict[str, float] = {}
        self._accounts = _Accounts()
        self._tenants: dict[str, _Tenant[T]] = {}
        self._waiting: Ticket[T] | None = None
        self._passed = 0.0
        self._num_queued = 0

    def __len__(self) -> int:
        """Return the number of queued requests."""
        return self._num_queued

    def set_weight(self, tenant: str, weight: float) -> None:
        """Set a tenant's weight for later charges; without one it is 1. Raises ValueError unless positive and finite."""
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(f"tenant {tenant} has weight {weight}; a weight is a positive number")
        self._weights[tenant] = weight

    def usage(self, tenant: str) -> float:
        """Return a tenant's usage; 0 if it is neither active nor ahead of the active ones."""
        return self._accounts[tenant].usage if tenant in self._accounts else 0.0

    def open(self, tenant: str, job: str) -> None:
        """Count one more open episode of a job."""
        self._accounts.enter(tenant)
        self._tenants.setdefault(tenant, _Tenant()).jobs.enter(job)

    def close(self, tenant: str, job: str) -> None:
        """Count one open episode less."""
        self._tenants[tenant].jobs.leave(job)
        self._leave(tenant)

    def push(self, tenant: str, job: str, item: T, *, cost: float, size: float = 0.0) -> Ticket[T]:
        """Queue a request behind those of the same job.

        Args:
            cost: estimate of its cost.
            size: room that it needs to be served.
        """
        ticket = Ticket(tenant, job, item, cost, size, is_queued=True)
        self.open(tenant, job)
        self._tenants[tenant].queues.setdefault(job, deque()).append(ticket)
        self._num_queued += 1
        return ticket

    def pop(self, room: float = math.inf) -> Ticket[T] | None:
        """Remove the next request that fits into `room`, charge its estimate and return it; None if none may be served."""
        if self._waiting is not None and self._waiting.size <= room:
            return self._serve(self._waiting)
        for ticket in self._heads():
            if ticket is self._waiting:
                continue
            if ticket.size <= room:
                if self._waiting is not None:
                    if self._passed + ticket.size > self.max_passed:
                        return None
                    self._passed += ticket.size
                return self._serve(ticket)
            if self._waiting is None:
                self._waiting, self._passed = ticket, 0.0
        return None

    def take(self, ticket: Ticket[T]) -> Ticket[T]:
        """Serve a queued request out of turn and charge its estimate; the bound's C then covers such a series of requests."""
        return self._serve(ticket)

    def settle(self, ticket: Ticket[T], cost: float) -> None:
        """End a served request, and replace the charged estimate by its real cost."""
        self._charge(ticket, cost - ticket.charged)
        ticket.charged = cost
        self.close(ticket.tenant, ticket.job)

    def remove(self, ticket: Ticket[T]) -> None:
        """Remove a request that is still queued; it is charged nothing. Does nothing if it is not queued."""
        if ticket.is_queued:
            self._unqueue(ticket)
            self.close(ticket.tenant, ticket.job)

    def charge(self, tenant: str, job: str, cost: float) -> None:
        """Add the cost of service elsewhere, such as on another replica, if the tenant is active here."""
        if tenant in self._tenants:
            self._charge(Ticket(tenant, job, None, 0.0, 0.0), cost)

    def _heads(self) -> Iterator[Ticket[T]]:
        with_requests = (name for name, tenant in self._tenants.items() if tenant.queues)
        for name in sorted(with_requests, key=lambda name: self._accounts[name].usage):
            yield from self._tenants[name].heads()

    def _serve(self, ticket: Ticket[T]) -> Ticket[T]:
        self._unqueue(ticket)
        self._charge(ticket, ticket.charged)
        return ticket

    def _unqueue(self, ticket: Ticket[T]) -> None:
        queues = self._tenants[ticket.tenant].queues
        queues[ticket.job].remove(ticket)
        if not queues[ticket.job]:
            del queues[ticket.job]
        ticket.is_queued = False
        self._num_queued -= 1
        if ticket is self._waiting:
            self._waiting = None

    def _charge(self, ticket: "Ticket[T] | Ticket[None]", cost: float) -> None:
        usage = cost / self._weights.get(ticket.tenant, 1.0)
        self._accounts.charge(ticket.tenant, usage)
        self._tenants[ticket.tenant].jobs.charge(ticket.job, usage)

    def _leave(self, tenant: str) -> None:
        self._accounts.leave(tenant)
        for name in [name for name in self._tenants if name not in self._accounts]:
            del self._tenants[name]
