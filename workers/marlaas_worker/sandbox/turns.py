"""Client for turns: requests a turn from the rollout role and retries until it succeeds or its time is over.

Retries are idempotent by the request id: a replica that has generated the turn answers with the recorded
result. `TurnClock` decides which time of a turn counts against its timeout, and which against its limit of waiting.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from marlaas_api import names, subjects
from marlaas_api.bus import Bus, BusUnavailable, Request
from marlaas_api.errors import Permanent, Retryable, Unreadable
from marlaas_api.messages import BusMessage, CancelRequest, GenerateReply, GenerateRequest, KeepRequest, ReplyPhase
from marlaas_api.wire import decode_as, encode

LEASE_S = 60.0
"""A replica drops a request after this many seconds without a message from its sandbox. The sandbox renews the lease three times as often."""
WAIT_S = 3600.0
"""Longest time that a turn waits for a place in an engine: longer than pools take to restart or to grow. After it, the turn's
episode is played again, under a new name.
"""
log = logging.getLogger(__name__)


class TurnFailed(Retryable):
    """The turn failed for a reason in the infrastructure; the text is for people."""


class TurnStopsEngine(Permanent):
    """The engine fails each time that it runs the turn's prompt; the text is for people."""


class TurnRefused(Permanent):
    """A turn cannot be generated from the environment's messages or with the base model's chat template; the text is for people.

    is_permanent: with this template, no turn can be generated, whatever the messages.
    """

    def __init__(self, text: str, *, is_permanent: bool = False) -> None:
        super().__init__(text)
        self.is_permanent = is_permanent


class TurnOverran(TurnFailed):
    """The turn exceeded its generation time (turnTimeoutSeconds)."""


class TurnWaited(Retryable):
    """The turn waited longer than `TurnTimeouts.wait_s` for a place in an engine. Nothing failed."""


class TurnTooLong(Permanent):
    """The request of a turn is larger than a message of the bus may be, because of what the environment appended."""


@dataclass(frozen=True, slots=True)
class TurnTimeouts:
    """Timeouts and retry intervals of turns, in seconds.

    Attributes:
        silence_s: time without a reply after which the same request is sent again (a busy replica sends a heartbeat every
            second).
        first_retry_s: backoff after the first retryable failure; it doubles with each further one.
        max_retry_s: longest backoff.
        keep_s: interval at which the request's lease is renewed (`LEASE_S`).
        wait_s: longest wait of a turn for a place in an engine.
    """

    silence_s: float = 5.0
    first_retry_s: float = 0.1
    max_retry_s: float = 2.0
    keep_s: float = LEASE_S / 3
    wait_s: float = WAIT_S


TURN_TIMEOUTS = TurnTimeouts()
MAX_GROUPS = 4096
"""Number of pairs (agent, group) for which a client remembers the replica that replied last. Those without a reply for longest are dropped."""
_EPISODE = {"namespace", "job", "uid", "agent", "episode"}


class TurnClient:
    """Requests all turns of one supervisor from the rollout role, and receives the replies. Use it as an async context manager.

    bus: carries the requests and replies. timeouts: of each turn, and retry intervals.
    """

    def __init__(self, bus: Bus, timeouts: TurnTimeouts = TURN_TIMEOUTS) -> None:
        self._bus = bus
        self._timeouts = timeouts
        self._inbox = bus.new_inbox()
        self._waiting: dict[str, _Waiting] = {}
        self._last_replicas: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._exits = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._exits.enter_async_context(self._bus.listen(self._inbox, self._on_reply))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exits.aclose()

    async def generate(self, request: GenerateRequest, timeout_s: float) -> GenerateReply:
        """Have a turn generated and return the result. After a timeout or a cancellation, the replica is asked to cancel the generation.

        timeout_s: limit of the generation (`TurnClock`); waits do not count.

        Raises:
            TurnFailed: a failure of the infrastructure that sending the request again cannot fix.
            TurnOverran: no result within `timeout_s`.
            TurnStopsEngine: the turn is the cause of the engine's failures.
            TurnRefused: the turn's messages cannot be rendered.
            TurnWaited: no place for the turn within `TurnTimeouts.wait_s`.
            TurnTooLong: the request is larger than the bus's limit.
        """
        request = request.model_copy(update={"last_replica": self._last_replicas.get(_group_of(request), "")})
        size = len(encode(request))
        if size > self._bus.max_payload_bytes:
            raise TurnTooLong(f"a turn of {size} bytes; a message has at most {self._bus.max_payload_bytes}")
        name = names.request_id(request.episode, request.turn)
        clock = TurnClock(timeout_s, self._timeouts.wait_s, _now())
        waiting = self._waiting[name] = _Waiting(request, clock, self._timeouts)
        try:
            return await self._request_until_final(waiting)
        except (TurnOverran, TurnWaited, asyncio.CancelledError):
            await self._notify(request, CancelRequest)
            raise
        finally:
            del self._waiting[name]

    async def _request_until_final(self, waiting: "_Waiting") -> GenerateReply:
        """Send the request until a reply is final; resend it after silence, and with backoff after a retryable failure."""
        pause_s = self._timeouts.first_retry_s
        while True:
            await self._send(waiting.request, waiting.request, self._inbox)
            reply = await self._next_decision(waiting)
            if reply is None:
                continue
            if reply.phase is ReplyPhase.RESULT:
                return reply
            if reply.is_refused:
                raise TurnRefused(reply.error, is_permanent=reply.is_permanent)
            if not reply.retryable:
                failure = TurnStopsEngine if reply.stops_engine else TurnFailed
                raise failure(f"{reply.replica}: {reply.error}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._timeouts.max_retry_s)

    async def _next_decision(self, waiting: "_Waiting") -> GenerateReply | None:
        """Return the next reply that is a result or a failure; None after `silence_s` without any reply. Renew the request's lease meanwhile."""
        waiting.heard_at = _now()
        keep_at = _now() + self._timeouts.keep_s
        while True:
            reply = await waiting.decision(keep_at)
            if reply is not None or _now() < keep_at:
                return reply
            await self._notify(waiting.request, KeepRequest)
            keep_at = _now() + self._timeouts.keep_s

    async def _notify(self, request: GenerateRequest, kind: type[CancelRequest] | type[KeepRequest]) -> None:
        """Send a message that keeps or cancels a request. The message may be lost: a lease ends by itself."""
        await self._send(request, kind(**request.model_dump(include=_EPISODE)))

    async def _send(self, request: GenerateRequest, message: BusMessage, inbox: str = "") -> None:
        subject = subjects.generation(request.namespace, request.job, request.agent)
        try:
            await self._bus.send(subject, encode(message), inbox)
        except BusUnavailable as error:
            log.warning(
                "cannot send %s for turn %d: %s", type(message).__name__, request.turn, error
            )  # resent after silence

    async def _on_reply(self, request: Request) -> None:
        try:
            reply = decode_as(GenerateReply, request.data)
        except Unreadable as error:
            log.warning("a message on the inbox of replies cannot be parsed: %s", error)
            return
        waiting = self._waiting.get(reply.request)
        if waiting is not None:
            self._note_replica(waiting.request, reply)
            waiting.receive(reply)

    def _note_replica(self, request: GenerateRequest, reply: GenerateReply) -> None:
        """Remember the replica that replied last to a request of this agent and group.

        The group's later requests name it, because it has cached their conversations.
        """
        group = _group_of(request)
        self._last_replicas[group] = reply.replica
        self._last_replicas.move_to_end(group)
        if len(self._last_replicas) > MAX_GROUPS:
            self._last_replicas.popitem(last=False)


@dataclass(slots=True)
class TurnClock:
    """Seconds of one turn, by category. The caller passes the time.

    Only time in which the engine generates, or in which the turn fails and is retried, counts against
    `turnTimeoutSeconds`. All other time is waiting (for a place in the engine, an adapter's slot, a replica that
    restarts) and has its own limit.

    A generation that was cut off because its engine or replica stopped is not counted: the next one has the
    whole timeout again.

    Attributes:
        timeout_s: limit of the time that counts (turnTimeoutSeconds).
        wait_s: limit of the waiting time.
        at: clock time up to which seconds are counted so far; at first, the start of the turn.
        waited_s: waiting time so far.
        running_s: seconds of the generation in progress; None if there is none.
        failed_s: seconds of failed generations, and from a failure to the next heartbeat.
    """

    timeout_s: float
    wait_s: float
    at: float
    waited_s: float = 0.0
    failed_s: float = 0.0
    running_s: float | None = None
    _fails: bool = False

    @property
    def counts(self) -> bool:
        """Whether the present time counts against `timeout_s`; else it counts against `wait_s`."""
        return self._fails or self.running_s is not None

    @property
    def left_s(self) -> float:
        """Seconds left at `at` of `timeout_s` while `counts`, else of `wait_s`; negative once the limit is exceeded."""
        if self.counts:
            return self.timeout_s - self.failed_s - (self.running_s or 0.0)
        return self.wait_s - self.waited_s

    def advance(self, now: float) -> None:
        """Count the time up to `now`."""
        elapsed, self.at = now - self.at, now
        if self.running_s is not None:
            self.running_s += elapsed
        elif self._fails:
            self.failed_s += elapsed
        else:
            self.waited_s += elapsed

    def beat(self, running_s: float | None, now: float) -> None:
        """Record a heartbeat. running_s: how long the engine has generated; None: the turn waits."""
        self.advance(now)
        self.running_s, self._fails = running_s, False

    def failed(self, waits: bool, now: float) -> None:
        """Record a failure, after which the turn is retried.

        waits: it failed because the engine had no place for it. The time until the next heartbeat then counts as waiting, and the
            generation so far is not counted. Else both count against `timeout_s`.
        """
        self.advance(now)
        if not waits:
            self.failed_s += self.running_s or 0.0
        self.running_s, self._fails = None, not waits

    def silent(self, now: float) -> None:
        """Record that the replica has gone silent: the turn waits until a replica replies."""
        self.advance(now)
        self.running_s, self._fails = None, False


class _Waiting:
    """One request in progress: its clock and the replies so far.

    Heartbeats are many. Each is counted when it arrives, but wakes the task in `decision` only if it brings the timeout nearer.

    Args:
        request: the request for a turn.
        clock: counts the request's time against its limits.
        timeouts: of the client.

    Attributes:
        heard_at: loop time of the last reply, or of the last sending of the request if that is later.
    """

    def __init__(self, request: GenerateRequest, clock: TurnClock, timeouts: TurnTimeouts) -> None:
        self.request = request
        self.heard_at = clock.at
        self._clock = clock
        self._timeouts = timeouts
        self._last_reply = "no reply"
        self._decisions: deque[GenerateReply] = deque()
        self._changed = asyncio.Event()
        self._until = clock.at

    def receive(self, reply: GenerateReply) -> None:
        self._last_reply = f"{reply.replica}: {reply.error or reply.doing or reply.phase.value}"
        self.heard_at = _now()
        self._count(reply, self.heard_at)
        is_decision = reply.phase in (ReplyPhase.RESULT, ReplyPhase.FAILED)
        if is_decision:
            self._decisions.append(reply)
        if is_decision or self._over_at < self._until:
            self._changed.set()

    @property
    def _over_at(self) -> float:
        return self._clock.at + self._clock.left_s

    async def decision(self, keep_at: float) -> GenerateReply | None:
        """Return the next reply that is a result or a failure; None after `silence_s` without any reply, or at `keep_at`.

        keep_at: loop time at which the request's lease must be renewed. Raises TurnOverran, TurnWaited.
        """
        while not self._decisions:
            now = _now()
            if now >= self._over_at:
                self._clock.advance(now)
                raise self._timed_out()
            silent_at = self.heard_at + self._timeouts.silence_s
            if now >= silent_at:
                self._clock.silent(now)
            if now >= min(silent_at, keep_at):
                return None
            self._until = min(self._over_at, silent_at, keep_at)
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._until):
                    await self._changed.wait()
        reply = self._decisions.popleft()
        if self._clock.left_s <= 0 and reply.phase is ReplyPhase.FAILED and reply.retryable:
            raise self._timed_out()
        return reply

    def _count(self, reply: GenerateReply, now: float) -> None:
        if reply.phase is ReplyPhase.HEARTBEAT:
            self._clock.beat(reply.running_s, now)
        elif reply.phase is ReplyPhase.FAILED:
            self._clock.failed(reply.waits, now)

    def _timed_out(self) -> Retryable:
        clock, agent = self._clock, self.request.agent
        if clock.counts:
            text = f"no turn of agent {agent!r} within {clock.timeout_s:g} s, waits not counted (turnTimeoutSeconds)"
            return TurnOverran(f"{text}; last: {self._last_reply}")
        return TurnWaited(f"a turn of agent {agent!r} waited {clock.waited_s:g} s; last: {self._last_reply}")


def _group_of(request: GenerateRequest) -> tuple[str, str]:
    return request.agent, request.group


def _now() -> float:
    return asyncio.get_running_loop().time()
