"""Weighted fair queue over tenants, their jobs, and the jobs' agents. Pure; uses no clock.

A tenant, a job and an agent are accounts, one level below the other; a path names them. The usage of an account is the cost
of its served requests; that of a tenant is divided by its weight. The queue serves the tenant with the smallest usage,
within it the job with the smallest usage, and within that the agent (VTC: Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024, section 4). Splitting its work into many jobs gains a tenant nothing.

- An account is active while it has open episodes, queued requests or requests in flight.
- The virtual time of a level is the smallest usage of its accounts with queued requests, and never falls: it keeps its largest value.
- On activation the usage of an account is lifted to the virtual time, or to the smallest usage of the active accounts if all
  are ahead of it. So an idle tenant saves up no credit.
- An active account without queued requests keeps its credit, so a tool call does not erase it. Its credit is bounded: when
  it queues a request again, its usage is at most its share of `max_credit` behind the virtual time. Its share is its weight
  divided by the weights of all active accounts. So a tenant that asks for little, or whose environments hang, cannot have
  the whole engine afterwards.
- A request is charged an estimate when it is served, and its real cost when it has ended (`settle`).
- A request that does not fit the free room may be passed by others, for at most `max_passed` of room. Then the queue
  waits for it. The usage of an account that passes exceeds the smallest one by at most `max_passed` / weight.

Bound: let tenants f and g have queued requests throughout an interval, and requests that are allowed (`pop`). C is the largest cost
of a request, E the largest sum of a tenant's errors of estimates in flight, P is `max_passed` or 0 if nothing is passed, W the
smaller of the sums of active weights when each of them queued its first request. Their services s in the interval differ by
|s_f/w_f - s_g/w_g| <= (C + 2E + P)(1/w_f + 1/w_g) + `max_credit`/W, however many episodes have opened, waited and ended
before. If both begin with equal usages and nothing is passed, it is (C + E)(1/w_f + 1/w_g). A queue that learns of service
elsewhere (`charge`) only after it has happened adds that service to E.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
Path = tuple[str, ...]
"""Names of accounts: a tenant, its job, and the job's agent. Requests of one job have paths of one length."""


@dataclass(slots=True, eq=False)
class Ticket(Generic[T]):
    """A request in the queue or in flight.

    Attributes:
        path: names of its accounts.
        item: the caller's own object.
        charged: cost that its accounts have been charged; before it is served, the estimate.
        size: room that it needs to be served (`FairQueue.pop`).
        is_queued: whether it waits in the queue.
    """

    path: Path
    item: T
    charged: float
    size: float
    is_queued: bool = False


Allows = Callable[[Ticket[T]], bool]


def _always(_: Ticket[T]) -> bool:
    return True


@dataclass(slots=True, eq=False)
class _Account(Generic[T]):
    """A tenant, job or agent, with the accounts or the queued requests below it.

    Attributes:
        weight: the tenant's; 1 for a job or an agent.
        usage: cost of its served requests, divided by `weight`; lifted on activation.
        num_active: open episodes, queued requests and requests in flight of it and of all accounts below. It is active if not 0.
        below: the accounts of the next level, by name: a tenant's jobs, a job's agents.
        waiting: those accounts of `below` that have queued requests.
        requests: the account's own queued requests, at the last level only.
        virtual: virtual time of the level below.
        active_weight: sum of the weights of the active accounts in `below`.
    """

    weight: float = 1.0
    usage: float = 0.0
    num_active: int = 0
    below: "dict[str, _Account[T]]" = field(default_factory=dict)
    waiting: "dict[str, _Account[T]]" = field(default_factory=dict)
    requests: deque[Ticket[T]] = field(default_factory=deque)
    virtual: float = 0.0
    active_weight: float = 0.0

    def enter(self, name: str, weight: float | None) -> "_Account[T]":
        """Count an episode or request that opens in an account below, lift the account's usage on activation, and return the account.

        Args:
            name: of the account; it is created if there is none.
            weight: the account's weight from now on; None keeps its weight.
        """
        account = self.below.get(name)
        if account is None:
            account = self.below[name] = _Account()
        if account.num_active == 0:
            account.usage = max(account.usage, self.floor())
        else:
            self.active_weight -= account.weight
        account.weight = account.weight if weight is None else weight
        self.active_weight += account.weight
        account.num_active += 1
        return account

    def leave(self, name: str) -> None:
        """Count an episode or request that ends in an account below. Drop idle accounts whose usage the next activation would lift anyway."""
        account = self.below[name]
        account.num_active -= 1
        if account.num_active:
            return
        active = [one for one in self.below.values() if one.num_active]
        self.active_weight = sum(one.weight for one in active)
        if not active:
            self.virtual = max(self.virtual, account.usage)
        floor = self.floor()
        self.below = {name: one for name, one in self.below.items() if one.num_active or one.usage > floor}

    def floor(self) -> float:
        """Return the usage to which an account below is lifted on activation."""
        active = (one.usage for one in self.below.values() if one.num_active)
        return max(self.virtual, min(active, default=self.virtual))

    def advance(self) -> None:
        """Advance the virtual time of the level below."""
        self.virtual = max(self.virtual, min((one.usage for one in self.waiting.values()), default=self.virtual))

    def bound_credit(self, name: str, max_credit: float) -> None:
        """Lift the usage of an active account below without queued requests, if it is more than the account's share of `max_credit` behind."""
        self.advance()
        account = self.below[name]
        account.usage = max(account.usage, self.virtual - max_credit / self.active_weight)

    def charge(self, cost: float) -> None:
        """Add the cost of a request to the usage."""
        self.usage += cost / self.weight

    def heads(self, max_lead: float, allows: "Allows[T]") -> Iterator[Ticket[T]]:
        """Yield the first request of each account at the last level, if it is allowed, in the order of usages.

        Args:
            max_lead: an account is left out if its request would make its usage exceed the smallest one by more than `max_lead` / weight.
                Only accounts whose request is allowed are compared. The one with the smallest usage is never left out.
            allows: returns whether a request may be served now.
        """
        if self.requests and allows(self.requests[0]):
            yield self.requests[0]
        first: _Account[T] | None = None
        for account in sorted(self.waiting.values(), key=lambda account: account.usage):
            for ticket in account.heads(max_lead, allows):
                first = first or account
                if account is first or (account.usage - first.usage) * account.weight + ticket.charged <= max_lead:
                    yield ticket


def check_weight(tenant: str, weight: float) -> None:
    """Raise ValueError unless a tenant's weight is positive and finite."""
    if not (weight > 0 and math.isfinite(weight)):
        raise ValueError(f"tenant {tenant} has weight {weight}; a weight is a positive number")


class FairQueue(Generic[T]):
    """Queue that serves requests in the order of their accounts' usages. All costs and sizes are in one unit: tokens, or seconds.

    Args:
        max_passed: most room that other requests may take, in sum, while the next request does not fit. Then the queue waits for that one.
        max_credit: credit that the active accounts of a level share by weight: when an account queues a request after a pause, its usage is
            at most its share behind the virtual time.
    """

    def __init__(self, max_passed: float = 0.0, max_credit: float = math.inf) -> None:
        self.max_passed, self.max_credit = max_passed, max_credit
        self._root: _Account[T] = _Account()
        self._waiting: Ticket[T] | None = None
        self._passed = 0.0
        self._num_queued = 0

    def __len__(self) -> int:
        """Return the number of queued requests."""
        return self._num_queued

    def usage(self, *path: str) -> float:
        """Return the usage of the account with this path; if it is idle or unknown, the usage that it would have on activation."""
        above, account = self._root, None
        for name in path:
            above = account or self._root
            account = above.below.get(name)
            if account is None:
                return above.floor()
        assert account is not None
        return account.usage if account.num_active else max(account.usage, above.floor())

    def open(self, path: Path, weight: float | None = None) -> None:
        """Count one more open episode in all accounts of a path. End it by `close`.

        weight: the tenant's from now on; None keeps its weight, which is 1 at first. Raises ValueError as `check_weight`.
        """
        if weight is not None:
            check_weight(path[0], weight)
        account = self._root
        for name in path:
            account = account.enter(name, weight if account is self._root else None)

    def close(self, path: Path) -> None:
        """Count one open episode less in all accounts of a path."""
        line = self._line(path)
        for above, name in reversed(list(zip(line, path, strict=False))):
            above.leave(name)

    def push(self, path: Path, item: T, *, cost: float, size: float = 0.0, weight: float | None = None) -> Ticket[T]:
        """Queue a request behind those of the same account, and return its ticket. End a served request by `settle`, a queued one by `remove`.

        Args:
            item: the caller's own object.
            cost: estimate of the request's cost.
            size: room that the request needs to be served; see `pop`.
            weight: as for `open`.
        """
        self.open(path, weight)
        ticket = Ticket(path, item, cost, size, is_queued=True)
        line = self._line(path)
        for above, account, name in zip(line, line[1:], path, strict=False):
            if name not in above.waiting:
                above.bound_credit(name, self.max_credit)
                above.waiting[name] = account
        line[-1].requests.append(ticket)
        self._num_queued += 1
        return ticket

    def pop(self, room: float = math.inf, allows: Allows[T] = _always) -> Ticket[T] | None:
        """Take the next request that fits from the queue, charge its estimate and return it; None if none may be served now.

        Args:
            room: free capacity of the server, in the unit of the sizes. A request fits if its size is at most that.
            allows: returns whether a request may be served now. If it may not, its account counts as if it had no request.
        """
        if self._waiting is not None and self._waiting.size <= room and allows(self._waiting):
            return self._serve(self._waiting)
        for ticket in self._root.heads(self.max_passed, allows):
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
        """Serve a queued request out of turn, and charge its estimate.

        In the module's fairness bound, requests of one account that are taken in a row count as one request: C is the cost of all of them.
        """
        return self._serve(ticket)

    def settle(self, ticket: Ticket[T], cost: float) -> None:
        """End a served request, and replace the charged estimate by its real cost. Call it once for each request."""
        self.charge(ticket.path, cost - ticket.charged)
        ticket.charged = cost
        self.close(ticket.path)

    def remove(self, ticket: Ticket[T]) -> None:
        """Remove a request that is still queued; it is charged nothing. Does nothing if it is not queued."""
        if ticket.is_queued:
            self._unqueue(ticket)
            self.close(ticket.path)

    def charge(self, path: Path, cost: float) -> None:
        """Add the cost of service to the active accounts of a path, for example of service on another replica."""
        for account in self._line(path)[1:]:
            if account.num_active:
                account.charge(cost)

    def _line(self, path: Path) -> Sequence[_Account[T]]:
        """Return the root and the accounts of a path, as far as they exist."""
        line = [self._root]
        for name in path:
            if (account := line[-1].below.get(name)) is None:
                break
            line.append(account)
        return line

    def _serve(self, ticket: Ticket[T]) -> Ticket[T]:
        for account in self._line(ticket.path):
            account.advance()
        self._unqueue(ticket)
        self.charge(ticket.path, ticket.charged)
        return ticket

    def _unqueue(self, ticket: Ticket[T]) -> None:
        line = self._line(ticket.path)
        line[-1].requests.remove(ticket)
        for above, account, name in reversed(list(zip(line, line[1:], ticket.path, strict=False))):
            if not (account.requests or account.waiting):
                del above.waiting[name]
        ticket.is_queued = False
        self._num_queued -= 1
        if ticket is self._waiting:
            self._waiting = None
