"""Limits the requests in the engine. Others wait in a fair queue over tenants, jobs and agents (`fair_queue`). No engine and no I/O."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

from marlaas_worker.fair_queue import FairQueue, Ticket
from marlaas_worker.rollout.accounts import Account, OpenEpisodes
from marlaas_worker.rollout.kv_budget import KvBudget, Place, PrefillShares


@dataclass(slots=True, eq=False)
class _Entry:
    """A request that waits for a place or has one.

    Attributes:
        account: the tenant, job and agent that are charged.
        num_prompt: prompt tokens that the engine has yet to compute for it; 0 once they are computed.
        granted: resolves when the request gets a place.
    """

    account: Account
    num_prompt: int
    granted: asyncio.Future[None]


class RequestLimiter:
    """Admits as many requests as the engine's batch and KV cache hold. Room goes to tenants by weight, then to jobs, then to agents.

    Requests wait here because the engine's own queue is first come, first served. Costs are tokens: prompt tokens outside the engine's
    prefix cache, and generated tokens. Other requests may pass one that does not fit, until they have taken as many tokens as the KV cache
    holds. While a tenant's episodes wait for tools, it keeps a credit (`fair_queue`): at most its share of the
    tokens that the KV cache holds. So it may afterwards fill its share of the batch at once.

    Args:
        max_seqs: most requests in the engine.
        clock: returns the time in seconds; None: `time.monotonic`.
        kv_tokens: tokens that the engine's KV cache holds; 0: unknown, then only the number of requests is limited.

    Attributes:
        budget: the tokens that the requests in the engine reserve.
        episodes: the open episodes, for which tenants keep their credit.
        prefill: each tenant's prompt tokens in the engine that are not computed yet, and the limit on them.
    """

    def __init__(self, max_seqs: int, clock: Callable[[], float] | None = None, kv_tokens: int = 0) -> None:
        self.budget = KvBudget(max_seqs, kv_tokens)
        self.prefill = PrefillShares()
        self._queue: FairQueue[_Entry] = FairQueue()
        self.episodes = OpenEpisodes(self._queue, clock or time.monotonic)
        self.set_kv_tokens(kv_tokens)
        self._num_inside = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._lone = asyncio.Lock()
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait in the queue."""
        return len(self._queue)

    def set_kv_tokens(self, kv_tokens: int) -> None:
        """Set the size of the engine's KV cache in tokens, after an engine start. 0: unknown."""
        self.budget.set_kv_tokens(kv_tokens)
        self._queue.max_passed = self._queue.max_credit = self.budget.kv_tokens

    def usage(self, tenant: str) -> float:
        """Return the tokens that a tenant has used, divided by its weight; for an idle tenant, the usage with which it would begin."""
        return self._queue.usage(tenant)

    def charge(self, tenant: str, num_tokens: float) -> None:
        """Add tokens that a tenant has used on another replica. They count only if the tenant has open episodes here."""
        self._queue.charge((tenant,), num_tokens)

    @contextlib.asynccontextmanager
    async def place(self, account: Account, num_prompt: int, output: int, kv_tokens: int = 0) -> AsyncIterator[Place]:
        """Wait for a place, and hold it while the context is open. At the end, `Place.cost`, set by the caller, replaces the estimated cost.

        The estimate is num_prompt + output.

        Args:
            account: the tenant, job and agent to charge.
            num_prompt: expected tokens of the prompt outside the prefix cache.
            output: expected tokens of the output.
            kv_tokens: expected length of the request's context at its end, in tokens; the request reserves that many in the KV cache.
        """
        entry = _Entry(account, num_prompt, asyncio.get_running_loop().create_future())
        cost, size = num_prompt + output, self.budget.size(kv_tokens)
        ticket = self._queue.push(account.path, entry, cost=cost, size=size, weight=account.weight)
        self.prefill.join(account.tenant, account.weight)
        self._grant()
        try:
            await entry.granted
        except asyncio.CancelledError:
            if entry.granted.cancelled():
                self._queue.remove(ticket)
                self._leave(entry)
            else:
                self._end(ticket, 0.0)
            raise
        place = Place(begin=partial(self._begin, entry))
        try:
            yield place
        finally:
            self._end(ticket, place.cost)

    @contextlib.asynccontextmanager
    async def alone(self, account: Account) -> AsyncIterator[Place]:
        """Wait until no request is in the engine, and admit no other while the context is open. At the end, charge `Place.cost`.

        The caller sets the cost. account: the tenant, job and agent to charge.
        """
        async with self._lone:
            self._is_closed = True
            place = Place()
            try:
                await self._empty.wait()
                yield place
            finally:
                self._is_closed = False
                self._queue.charge(account.path, place.cost)
                self._grant()

    def _grant(self) -> None:
        while not self._is_closed and (room := self.budget.room) >= 0:
            ticket = self._queue.pop(
                room, lambda one: self.prefill.allows(one.item.account.tenant, one.item.num_prompt)
            )
            if ticket is None:
                return
            if ticket.item.granted.cancelled():
                self._queue.settle(ticket, 0.0)
                continue
            self.budget.take(ticket.size)
            self.prefill.add(ticket.item.account.tenant, ticket.item.num_prompt)
            self._num_inside += 1
            self._empty.clear()
            ticket.item.granted.set_result(None)

    def _begin(self, entry: _Entry) -> None:
        """Note that a request's prompt has been computed. Later calls for the same request do nothing."""
        if entry.num_prompt:
            self.prefill.add(entry.account.tenant, -entry.num_prompt)
            entry.num_prompt = 0
            self._grant()

    def _end(self, ticket: Ticket[_Entry], cost: float) -> None:
        self._queue.settle(ticket, cost)
        self.budget.give_back(ticket.size)
        self._num_inside -= 1
        if not self._num_inside:
            self._empty.set()
        self._begin(ticket.item)
        self._leave(ticket.item)

    def _leave(self, entry: _Entry) -> None:
        self.prefill.leave(entry.account.tenant)
        self._grant()
