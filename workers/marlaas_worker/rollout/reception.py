"""Receives generation requests, and forwards each to the replica that owns its group.

NATS distributes a pool's requests over its replicas (queue group); each replica also listens on a subject of
its own for forwarded requests. All replicas choose the same owner independently (`agent_placement`).

A sandbox's permissions limit the subjects on which it publishes. So a request whose names differ from its subject is
ignored. The permissions do not limit the reply subject. So the reply subject is checked, too (`subjects.is_reply_of`).
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from functools import partial

from marlaas_api import subjects, wire
from marlaas_api.bucket_cache import BucketCache
from marlaas_api.bus import Request
from marlaas_api.errors import MarlaasError, Unreadable
from marlaas_api.messages import CancelRequest, GenerateRequest, JobAgent, KeepRequest, ReplicaReport
from marlaas_api.names import AgentRef
from marlaas_worker.role import RoleContext
from marlaas_worker.rollout.agent_placement import AgentPlacement, place_agents
from marlaas_worker.rollout.request_limiter import OtherReplicas
from marlaas_worker.rollout.requests import Requests
from marlaas_worker.rollout.supervised_engine import SupervisedEngine

QUEUE = "rollout"
_PLACEMENT_S = 1.0
Handler = Callable[[Request], Awaitable[None]]
_Message = GenerateRequest | CancelRequest | KeepRequest
_log = logging.getLogger(__name__)


class Reception:
    """Subscribes to the requests of a pool's agents, and passes each to `Requests` here or to the replica that owns its group.

    Args:
        context: has the bus and this replica's name.
        pool: name of the pool.
        requests: gets the requests of the groups that this replica owns.
        engine: its readiness decides whether this replica counts as live; its limiter is charged for use on other replicas.
    """

    def __init__(self, context: RoleContext, pool: str, requests: Requests, engine: SupervisedEngine) -> None:
        self._bus = context.bus
        self._me = context.name
        self._pool = pool
        self._requests = requests
        self._engine = engine
        self._replicas = BucketCache(
            lambda: self._bus.bucket(subjects.REPLICAS), ReplicaReport, self._on_report, prefix=f"rollout.{pool}."
        )
        self._others = OtherReplicas()
        self._listening: dict[str, AsyncExitStack] = {}
        self._agents: tuple[JobAgent, ...] = ()
        self._keys: dict[str, str] = {}
        self._placement: AgentPlacement | None = None
        self._placed_on: frozenset[str] = frozenset()
        self._placed_at = -math.inf

    async def follow(self) -> None:
        """Keep the cache of replica reports up to date, until cancelled."""
        await self._replicas.follow()

    async def listen_to(self, agents: Iterable[JobAgent]) -> None:
        """Subscribe to the requests of these agents and to this replica's own subject; unsubscribe from all others.

        All calls must come from the same task. Raises BusUnavailable; the subscriptions that were opened before the error stay open.
        """
        self._agents, self._placement = tuple(agents), None
        self._keys = {subject: one.policy_key for one in self._agents for subject in one.generations}
        wanted = self._keys.keys()
        own = subjects.engine(self._pool, self._me)
        for subject in self._listening.keys() - wanted - {own}:
            await self._listening.pop(subject).aclose()
        if own not in self._listening:
            await self._open(own, self._on_forwarded, "")
        for subject in wanted - self._listening.keys():
            await self._open(subject, self._on_request, QUEUE)

    async def close(self) -> None:
        """Unsubscribe from everything. Must be called by the task that subscribed."""
        while self._listening:
            _, stack = self._listening.popitem()
            await stack.aclose()

    def live(self) -> set[str]:
        """Return the names of the replicas that can serve.

        Another replica can if its last report says so and is recent (`REPLICA_TTL_S`). This one is included if it is ready, or if there is
        no other.
        """
        now = asyncio.get_running_loop().time()
        reports = ((report, now - at) for _, report, at in self._replicas.items())
        names = {report.replica for report, age_s in reports if report.ready and age_s < subjects.REPLICA_TTL_S}
        names.discard(self._me)
        is_ready = self._engine.up and not self._requests.closed
        return names | {self._me} if is_ready or not names else names

    def placement(self) -> AgentPlacement:
        """Return the placement of agents on replicas; recompute it if agents or live replicas have changed, or it is older than 1 s."""
        live, now = frozenset(self.live()), asyncio.get_running_loop().time()
        if self._placement is None or live != self._placed_on or now - self._placed_at > _PLACEMENT_S:
            reports = [report for _, report, _ in self._replicas.items()]
            self._placement = place_agents(self._agents, live, self._engine.limits.max_num_seqs, reports)
            self._placed_on, self._placed_at = live, now
        return self._placement

    def placed_on_others(self) -> frozenset[AgentRef]:
        """Return the agents whose requests only other replicas serve."""
        placed = self.placement()
        return frozenset(one.agent_ref for one in self._agents if self._me not in placed.of(one.policy_key))

    def _on_report(self, key: str) -> None:
        """Charge tenants in this replica's limiter for the tokens that they used on another replica since that replica's previous report.

        key: of a report in the bucket, which is new or gone. After a report is gone, the totals of its replica are forgotten.
        """
        report = self._replicas.get(key)
        if report is None:
            self._others.drop(key)
        elif report.replica != self._me:
            for tenant, num_tokens in self._others.growth(key, report.tenant_tokens).items():
                self._engine.limiter.charge(tenant, num_tokens)

    async def _open(self, subject: str, handler: Handler, queue: str) -> None:
        stack = AsyncExitStack()
        await stack.enter_async_context(self._bus.listen(subject, partial(_handle, handler), queue))
        self._listening[subject] = stack

    async def _on_request(self, request: Request) -> None:
        message = _parse(request)
        if message is None:
            return
        if request.subject != subjects.generation(message.namespace, message.job, message.agent):
            _log.error("ignored a request on %s that names %s, agent %s", request.subject, message.ref, message.agent)
        elif not isinstance(message, GenerateRequest):
            await self._broadcast(message)
        elif not subjects.is_reply_of(message.namespace, message.job, request.reply):
            _log.error("ignored a request on %s with the foreign reply subject %s", request.subject, request.reply)
        elif (name := self._owner(message)) == self._me:
            await self._requests.accept(message, request.reply)
        else:
            await self._forward(name, message.model_copy(update={"reply_to": request.reply}))

    def _owner(self, message: GenerateRequest) -> str:
        subject = subjects.generation(message.namespace, message.job, message.agent)
        return self.placement().owner(self._keys.get(subject, ""), message.group, message.last_replica)

    async def _broadcast(self, message: CancelRequest | KeepRequest) -> None:
        """Apply a message here and forward it to all other live replicas: an earlier owner of the group may still run the episode's requests."""
        self._apply(message)
        for name in self.live() - {self._me}:
            await self._forward(name, message)

    def _apply(self, message: CancelRequest | KeepRequest) -> None:
        if isinstance(message, CancelRequest):
            self._requests.cancel(message)
        else:
            self._requests.keep(message)

    async def _forward(self, name: str, message: _Message) -> None:
        """Forward a message to a replica, once; an error is only logged. A sandbox sends a lost request again. name: of the replica."""
        try:
            await self._bus.send(subjects.engine(self._pool, name), wire.encode(message))
        except MarlaasError as error:
            _log.warning("cannot forward a request to replica %s: %s", name, error)

    async def _on_forwarded(self, request: Request) -> None:
        message = _parse(request)
        if isinstance(message, CancelRequest | KeepRequest):
            self._apply(message)
        elif isinstance(message, GenerateRequest):
            inbox = message.reply_to or request.reply
            if subjects.is_reply_of(message.namespace, message.job, inbox):
                await self._requests.accept(message, inbox)


async def _handle(handler: Handler, request: Request) -> None:
    """Handle a request. Log an exception instead of raising it: one tenant's request must not end the role for all tenants."""
    try:
        await handler(request)
    except Exception:
        _log.exception("a request on %s failed", request.subject)


def _parse(request: Request) -> _Message | None:
    try:
        message = wire.decode(request.data)
    except Unreadable as error:
        _log.error("ignored a request on %s that cannot be parsed: %s", request.subject, error)
        return None
    return message if isinstance(message, GenerateRequest | CancelRequest | KeepRequest) else None
