"""Decides which requests may enter the engine: as many as its batch and KV cache hold, from the tenants that have used least of their share.

The others wait in a fair queue over tenants, jobs and agents (`fair_queue`): each request is charged to an account. No engine and no I/O.

When vLLM's KV cache is full, vLLM preempts a request and later computes its tokens again. So requests wait outside the engine
until their tokens fit. A request reserves its prompt and the output that is expected of its job. It does not reserve
`maxTokens`: most outputs are much shorter, and most of the cache would stay unused. An output that is longer than
expected is not counted while it is generated, because the engine reports tokens only at the end; outputs that are
shorter than expected make up for it.
"""

import asyncio
import contextlib
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from marlaas_api.messages import JobDocument
from marlaas_worker.fair_queue import FairQueue, Path, Ticket

OPEN_S = 60.0
"""Seconds for which an episode counts as open after its last request has ended, because its end is not reported to this role.

Longer than nearly all tool calls. A long time does no harm: the tenant of an open episode keeps its credit in the queue, but never more
than its share of `max_credit` (`fair_queue`), however long the tenant sends no request.
"""
BLOCK_TOKENS = 32
"""Tokens per block of the KV cache. A block belongs to one request, so reservations are rounded up to blocks."""
_STEPS = 2


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

    @contextlib.contextmanager
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


class KvBudget:
    """Reservations of the requests in the engine: at most `max_seqs` requests, and at most `kv_tokens` tokens of its KV cache.

    Args:
        max_seqs: most requests in the engine.
        kv_tokens: as in `set_kv_tokens`.

    Attributes:
        num_reserved: tokens that are reserved now.
    """

    def __init__(self, max_seqs: int, kv_tokens: int = 0) -> None:
        self._max_seqs = max_seqs
        self._num_inside = 0
        self.num_reserved = 0.0
        self.set_kv_tokens(kv_tokens)

    @property
    def kv_tokens(self) -> float:
        """Tokens that fit into the KV cache; infinite if the engine does not say."""
        return self._kv_tokens

    @property
    def room(self) -> float:
        """Tokens that can be reserved now; negative if no request may enter; infinite if the engine is empty or `kv_tokens` is.

        An engine without requests takes any: a request that was queued for an earlier incarnation may be larger than its KV cache.
        """
        if self._num_inside == 0:
            return math.inf
        return self._kv_tokens - self.num_reserved if self._num_inside < self._max_seqs else -1.0

    def set_kv_tokens(self, kv_tokens: int) -> None:
        """Set the size of the KV cache in tokens, after an engine start. 0: unknown."""
        self._kv_tokens = float(kv_tokens) if kv_tokens > 0 else math.inf

    def size(self, num_tokens: int) -> float:
        """Return the tokens to reserve for a request of `num_tokens`: whole blocks, at most the KV cache, so that every request fits alone."""
        return min(float(math.ceil(num_tokens / BLOCK_TOKENS) * BLOCK_TOKENS), self._kv_tokens)

    def take(self, size: float) -> None:
        """Reserve the room of a request that enters the engine. size: as from `size`."""
        self._num_inside += 1
        self.num_reserved += size

    def give_back(self, size: float) -> None:
        """Free the room of a request that has left the engine."""
        self._num_inside -= 1
        self.num_reserved -= size


@dataclass(slots=True)
class _Present:
    """A tenant with requests that wait for a place or are in the engine.

    weight: the tenant's. num_requests: these requests. num_prompt: tokens of their prompts in the engine that are not computed yet.
    """

    weight: float
    num_requests: int = 0
    num_prompt: int = 0


class PrefillShares:
    """Limits the prompt tokens that the engine has yet to compute for a tenant.

    The limit is the tenant's share, by weight, of the tokens of two steps: the one that runs, and the next one, which begins before the
    role learns of the first tokens of the running one. An engine computes prompts in the same steps as the next tokens of all other
    requests. If one tenant's prompts filled every step, each token of the others would take as long as a full step.

    A prompt that is larger than the share enters while the tenant has no other prompt to compute. A tenant that is the only one with
    requests is not limited.

    step_tokens: most tokens that the engine computes in one step; 0 if unknown: then no tenant is limited.
    """

    def __init__(self) -> None:
        self.step_tokens = 0
        self._present: dict[str, _Present] = {}

    def join(self, tenant: str, weight: float) -> None:
        """Count a tenant's request that begins to wait for a place in the engine. weight: the tenant's, from now on."""
        one = self._present.setdefault(tenant, _Present(weight))
        one.weight = weight
        one.num_requests += 1

    def leave(self, tenant: str) -> None:
        """Remove a request that has left the engine, or waits no longer."""
        one = self._present[tenant]
        one.num_requests -= 1
        if not one.num_requests:
            del self._present[tenant]

    def allows(self, tenant: str, num_prompt: int) -> bool:
        """Return whether a tenant's prompt may enter the engine now. num_prompt: its tokens that the engine has to compute."""
        one = self._present[tenant]
        if not (self.step_tokens and one.num_prompt and len(self._present) > 1):
            return True
        share = one.weight / sum(other.weight for other in self._present.values())
        return one.num_prompt + num_prompt <= share * _STEPS * self.step_tokens

    def add(self, tenant: str, num_prompt: int) -> None:
        """Change the number of a tenant's prompt tokens that the engine has yet to compute.

        num_prompt: tokens of a prompt that enters the engine; the negative number once the prompt has been computed, or will not be.
        """
        self._present[tenant].num_prompt += num_prompt


@dataclass(slots=True, eq=False)
class Place:
    """A request's place in the engine.

    Attributes:
        cost: real cost of the request in tokens, set by the place's holder; 0 until then.
        begin: the place's holder calls it at the request's first token, when its prompt has been computed.
    """

    cost: float = 0.0
    begin: Callable[[], None] = lambda: None


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
