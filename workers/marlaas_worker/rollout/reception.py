"""Receives generation requests, and forwards each to the replica that owns its group.

NATS distributes a pool's requests over its replicas (queue group); each replica also listens on a subject of
its own for forwarded requests. All replicas choose the same owner independently: `place_agents` and `AgentPlacement` are pure, and
compute the same from the same documents and reports.

An agent is placed on the fewest replicas whose batches hold its open episodes; the other replicas need not hold its adapter.
`placement.place` places all agents together. An agent that needs n replicas enters as n parts of equal cost, which go to different ones.

The members of a group go to one replica, which computes their prompt once.

- A new group goes to one of its agent's replicas. Each replica gets new groups in proportion to 1 / (load + EVEN)². Its load is the
  number of requests that its engine runs or that wait in the replica. Reported loads are some seconds old, so the least loaded replica
  does not get all new groups: it would be overloaded before its next report.
- Later turns, and later members, go where the group's last turn was generated: the conversation's keys and values are cached
  there. If that replica is overloaded (its load is more than OVERLOAD times that of the agent's least loaded one, and
  MIN_EXCESS more), a part of its groups moves: the part by which its load exceeds the mean.

Replicas that see different documents or reports for a moment may choose different owners of a group. Then two replicas generate the
same turn, and the first record counts (`turn_log`).

A sandbox's permissions limit the subjects on which it publishes. So a request whose names differ from its subject is
ignored. The permissions do not limit the reply subject. So the reply subject is checked, too (`subjects.is_reply_of`).
"""

import asyncio
import logging
import math
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

from marlaas_api import subjects, wire
from marlaas_api.bucket_cache import BucketCache
from marlaas_api.bus import Request
from marlaas_api.errors import MarlaasError, Unreadable
from marlaas_api.messages import CancelRequest, GenerateRequest, JobAgent, KeepRequest, ReplicaReport
from marlaas_api.names import AgentRef, group_token
from marlaas_worker.placement import AgentLoad, place, rank
from marlaas_worker.role import RoleContext
from marlaas_worker.rollout.requests import Requests
from marlaas_worker.rollout.supervised_engine import SupervisedEngine

QUEUE = "rollout"
_PLACEMENT_S = 1.0
MIN_PART = 0.1
"""Lower bound of the ratio that scales an agent's cost: its recent tokens / the mean of its job's agents. An idle agent may become busy."""
EVEN = 8
"""Requests that are added to every load, so that a difference of a few requests hardly changes where new groups go."""
OVERLOAD, MIN_EXCESS = 2.0, 8
_NUMBER = re.compile(r"[a-z](\d+)")
_BITS = 32

Handler = Callable[[Request], Awaitable[None]]
_Message = GenerateRequest | CancelRequest | KeepRequest
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentPlacement:
    """The replicas that serve each agent, and the load of each replica.

    Attributes:
        by_agent: names of replicas by the agent's policy key, the one that ranks highest first.
        everywhere: all replicas; they serve the agents that `by_agent` does not contain.
        loads: number of requests that each replica runs or that wait in it, by the replica's name.
    """

    by_agent: Mapping[str, tuple[str, ...]]
    everywhere: tuple[str, ...]
    loads: Mapping[str, int] = field(default_factory=dict)

    def of(self, policy_key: str) -> tuple[str, ...]:
        """Return an agent's replicas, the one that ranks highest first."""
        return self.by_agent.get(policy_key, self.everywhere)

    def owner(self, policy_key: str, group: str, last: str = "") -> str:
        """Return the replica that generates the next turns of a group.

        Args:
            policy_key: of the agent. All replicas serve an agent that is not in `by_agent`.
            group: name of the group; any text is accepted, because the owner is chosen before the request is checked.
            last: replica that generated the group's last turn; empty if it is not known.
        """
        replicas = self.of(policy_key)
        if last not in replicas:
            return self._chosen(replicas, group)
        others = [name for name in replicas if not self._is_overloaded(name, replicas)]
        if last in others or not self._moves(group, last, replicas):
            return last
        return self._chosen(others, group)

    def _chosen(self, replicas: Sequence[str], group: str) -> str:
        """Choose a replica for a group. Consecutive groups are spread evenly, in proportion to 1 / (load + EVEN)²."""
        limits = list(accumulate((self._load(name) + EVEN) ** -2.0 for name in replicas))
        position = _spread(_number(group)) * limits[-1]
        return next(name for name, limit in zip(replicas, limits, strict=True) if position < limit)

    def _is_overloaded(self, replica: str, replicas: Iterable[str]) -> bool:
        least, load = min(map(self._load, replicas)), self._load(replica)
        return load > OVERLOAD * least and load > least + MIN_EXCESS

    def _moves(self, group: str, replica: str, replicas: Sequence[str]) -> bool:
        """Return whether a group leaves an overloaded replica.

        Of the replica's groups, a part of 1 - mean load / the replica's load leaves, chosen by hash. replicas: those of the group's agent.
        """
        load = self._load(replica)
        excess = 1.0 - sum(map(self._load, replicas)) / len(replicas) / load
        return rank(group, replica) < excess * 2.0**64

    def _load(self, replica: str) -> int:
        return self.loads.get(replica, 0)


def place_agents(
    agents: Collection[JobAgent], replicas: Collection[str], num_seqs: int, reports: Iterable[ReplicaReport]
) -> AgentPlacement:
    """Place agents on replicas.

    Args:
        agents: the agents that the pool serves.
        replicas: names of the replicas that can serve; at least one.
        num_seqs: most requests that the engine of one replica runs at once.
        reports: latest reports of the replicas. An agent stays where a report has its adapter, if the loads allow. A report's
            recent tokens of each agent divide a job's load among the job's agents. Its numbers of requests become `AgentPlacement.loads`.
    """
    reports = sorted(reports, key=lambda report: report.replica)
    episodes = {one.policy_key: one.document.spec.open_episodes for one in agents}
    costs = _costs(agents, episodes, reports)
    held = _held(reports)
    parts: dict[str, AgentLoad] = {}
    for one in agents:
        key = one.policy_key
        num = max(1, min(len(replicas), math.ceil(episodes[key] / num_seqs)))
        holders = _newest_first(key, held.get(_stem(one.adapter(0).engine_name), {}), replicas)
        for number in range(num):
            holder = holders[number] if number < len(holders) else ""
            parts[f"{key}/{number}"] = AgentLoad(costs[key] / num, holder, whole=key)
    found: defaultdict[str, list[str]] = defaultdict(list)
    for part, replica in place(parts, replicas).items():
        found[part.partition("/")[0]].append(replica)
    loads = {report.replica: report.num_running + report.num_waiting for report in reports}
    return AgentPlacement({key: _ranked(key, names) for key, names in found.items()}, _ranked("", replicas), loads)


def _costs(agents: Iterable[JobAgent], loads: Mapping[str, int], reports: Iterable[ReplicaReport]) -> dict[str, float]:
    """Return the cost of each agent by policy key: its load times the ratio of its recent tokens to the mean of its job's agents.

    loads: open episodes by policy key. The ratio is at least `MIN_PART`; it is 1 if the job has no recent tokens.
    """
    tokens: defaultdict[str, float] = defaultdict(float)
    for report in reports:
        for key, number in report.agent_tokens.items():
            tokens[key] += number
    by_job: dict[str, list[str]] = {}
    for one in agents:
        by_job.setdefault(one.document.uid, []).append(one.policy_key)
    costs = {key: float(load) for key, load in loads.items()}
    for keys in by_job.values():
        mean = sum(tokens[key] for key in keys) / len(keys)
        if mean > 0:
            costs |= {key: loads[key] * max(tokens[key] / mean, MIN_PART) for key in keys}
    return costs


def _ranked(key: str, replicas: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(replicas, key=lambda replica: (-rank(key, replica), replica)))


def _held(reports: Iterable[ReplicaReport]) -> dict[str, dict[str, int]]:
    """Return the number of the newest version that each replica holds of each agent.

    By the part of the engine name that is the same for all versions of an agent (`_stem`), then by replica.
    """
    found: dict[str, dict[str, int]] = {}
    for report in reports:
        for name in report.verified:
            newest = found.setdefault(_stem(name), {})
            newest[report.replica] = max(newest.get(report.replica, -1), _version(name))
    return found


def _newest_first(key: str, held: Mapping[str, int], replicas: Collection[str]) -> list[str]:
    """Return the replicas that hold a version of an agent. Those with the newest version come first.

    A replica that no longer serves the agent may keep an old version for long. key: the policy key. held: newest version by replica.
    """
    return sorted((name for name in _ranked(key, replicas) if name in held), key=lambda name: -held[name])


def _stem(engine_name: str) -> str:
    return engine_name.partition("@")[0]


def _version(engine_name: str) -> int:
    text = engine_name.partition("@v")[2]
    return int(text) if text.isdigit() else 0


def _number(group: str) -> int:
    """Return the number in a group's name, such as 12 in `<uid>-t12`; 0 if the name is not valid."""
    try:
        match = _NUMBER.match(group_token(group))
        return int(match[1]) if match else 0
    except ValueError:
        return 0


def _spread(number: int) -> float:
    """Return the number's element of van der Corput's sequence, in [0, 1). Those of consecutive numbers are far from one another."""
    return int(f"{number % (1 << _BITS):0{_BITS}b}"[::-1], 2) / (1 << _BITS)


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
