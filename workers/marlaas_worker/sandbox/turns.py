"""Client for turns: requests a turn from the rollout role and retries until it succeeds or its time is over.

Retries are idempotent by the request id: a replica that has generated the turn answers with the recorded
result. `turn_clock` defines which time counts.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from marlaas_api import names, subjects
from marlaas_api.bus import Bus, BusUnavailable, Request
from marlaas_api.errors import Permanent, Retryable
from marlaas_api.messages import BusMessage, CancelRequest, GenerateReply, GenerateRequest, KeepRequest, ReplyPhase
from marlaas_api.wire import BadMessage, decode_as, encode
from marlaas_worker.sandbox.turn_clock import TurnClock

LEASE_S = 60.0
"""A replica drops a request when its sandbox is silent for this long. A sandbox renews three times as often."""
WAIT_S = 3600.0
"""Longest wait of a turn for its place: longer than pools take to restart or to grow. Then its episode is played
again, under a new name.
"""
log = logging.getLogger(__name__)


class TurnFailed(Retryable):
    """The turn failed for a reason in the infrastructure; the text is for people."""


class TurnOverran(TurnFailed):
    """The turn exceeded its generation time (turnTimeoutSeconds)."""


class TurnWaited(Retryable):
    """The turn waited for its place longer than `Patience.wait_s`. Nothing failed."""


class TurnTooLong(Permanent):
    """The text that the environment appended does not fit into a message."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Timeouts and retry intervals of turns, in seconds.

    Attributes:
        heard_s: silence after which the same request is sent again (a busy replica sends a heartbeat every
            second).
        first_retry_s, max_retry_s: first and longest backoff.
        keep_s: interval at which the request's lease is renewed.
        wait_s: longest wait of a turn.
    """

    heard_s: float = 5.0
    first_retry_s: float = 0.1
    max_retry_s: float = 2.0
    keep_s: float = LEASE_S / 3
    wait_s: float = WAIT_S


PATIENCE = Patience()
_EPISODE = {"namespace", "job", "uid", "agent", "episode"}


class TurnClient:
    """Requests all turns of one supervisor; replies arrive on one inbox. Use as an async context."""

    def __init__(self, bus: Bus, patience: Patience = PATIENCE) -> None:
        self._bus = bus
        self._patience = patience
        self._inbox = bus.new_inbox()
        self._waiting: dict[str, _Waiting] = {}
        self._exits = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._exits.enter_async_context(self._bus.listen(self._inbox, self._on_reply))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exits.aclose()

    async def generate(self, request: GenerateRequest, timeout_s: float) -> GenerateReply:
        """Return the result of a turn; on cancellation, cancel the generation.

        timeout_s: limit of the generation; waits do not count.

        Raises:
            TurnFailed: a failure that a retry cannot fix; TurnOverran: no result in time.
            TurnWaited: no place for the turn within `Patience.wait_s`.
            TurnTooLong: the request is larger than the bus's limit.
        """
        size = len(encode(request))
        if size > self._bus.max_payload_bytes:
            raise TurnTooLong(f"a turn of {size} bytes; at most {self._bus.max_payload_bytes} fit into a message")
        name = names.request_id(request.episode, request.turn)
        clock = TurnClock(timeout_s, self._patience.wait_s, _now())
        waiting = self._waiting[name] = _Waiting(request, clock, self._patience)
        try:
            return await self._ask(waiting)
        except (TurnOverran, TurnWaited, asyncio.CancelledError):
            await self._say(request, CancelRequest)
            raise
        finally:
            del self._waiting[name]

    async def _ask(self, waiting: "_Waiting") -> GenerateReply:
        """Send the request; resend it after silence, and with backoff after a retryable failure."""
        pause_s = self._patience.first_retry_s
        while True:
            await self._send(waiting.request, waiting.request, self._inbox)
            reply = await self._decision(waiting)
            if reply is None:
                continue
            if reply.phase is ReplyPhase.RESULT:
                return reply
            if not reply.retryable:
                raise TurnFailed(f"{reply.replica}: {reply.error}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._patience.max_retry_s)

    async def _decision(self, waiting: "_Waiting") -> GenerateReply | None:
        """Return the next result or failure, None after a silence; renew the request's lease meanwhile."""
        keep_at = _now() + self._patience.keep_s
        while True:
            reply = await waiting.next()
            if reply is None or reply.phase in (ReplyPhase.RESULT, ReplyPhase.FAILED):
                return reply
            if _now() >= keep_at:
                await self._say(waiting.request, KeepRequest)
                keep_at = _now() + self._patience.keep_s

    async def _say(self, request: GenerateRequest, kind: type[CancelRequest] | type[KeepRequest]) -> None:
        """Send a keep or cancel message for a request; nothing depends on its arrival."""
        await self._send(request, kind(**request.model_dump(include=_EPISODE)))

    async def _send(self, request: GenerateRequest, message: BusMessage, inbox: str = "") -> None:
        subject = subjects.generation(request.namespace, request.job, request.agent)
        try:
            await self._bus.send(subject, encode(message), inbox)
        except BusUnavailable as error:
            log.warning("%s for turn %d: %s", type(message).__name__, request.turn, error)  # resent after silence

    async def _on_reply(self, request: Request) -> None:
        try:
            reply = decode_as(GenerateReply, request.data)
        except BadMessage as error:
            log.warning("not a reply: %s", error)
            return
        waiting = self._waiting.get(reply.request)
        if waiting is not None:
            waiting.hear(reply)


class _Waiting:
    """One request in progress: its clock and the replies so far."""

    def __init__(self, request: GenerateRequest, clock: TurnClock, patience: Patience) -> None:
        self.request = request
        self._clock = clock
        self._patience = patience
        self._last_words = "nobody answered"
        self._heard: asyncio.Queue[GenerateReply] = asyncio.Queue()

    def hear(self, reply: GenerateReply) -> None:
        self._last_words = f"{reply.replica}: {reply.error or reply.doing or reply.phase.value}"
        self._heard.put_nowait(reply)

    async def next(self) -> GenerateReply | None:
        """Return the next reply, None after a silence. Raises TurnOverran, TurnWaited."""
        silence_s, left_s = self._patience.heard_s, self._clock.left_s
        reply = await self._within(min(silence_s, left_s))
        if reply is None and left_s <= silence_s:
            self._clock.advance(_now())
            raise self._over()
        self._count(reply)
        if self._clock.left_s <= 0 and not (reply is not None and _is_final(reply)):
            raise self._over()
        return reply

    async def _within(self, seconds: float) -> GenerateReply | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._heard.get()
        return None

    def _count(self, reply: GenerateReply | None) -> None:
        clock, now = self._clock, _now()
        if reply is None:
            clock.silent(now)
        elif reply.phase is ReplyPhase.HEARTBEAT:
            clock.beat(reply.running_s, now)
        elif reply.phase is ReplyPhase.FAILED:
            clock.failed(reply.waits, now)

    def _over(self) -> Retryable:
        clock, agent = self._clock, self.request.agent
        if clock.counts:
            text = f"no turn of agent {agent!r} within {clock.timeout_s:g} s, waits not counted (turnTimeoutSeconds)"
            return TurnOverran(f"{text}; last: {self._last_words}")
        return TurnWaited(f"a turn of agent {agent!r} waited {clock.waited_s:g} s; last: {self._last_words}")


def _is_final(reply: GenerateReply) -> bool:
    """Return whether a retry makes no difference."""
    return reply.phase is ReplyPhase.RESULT or (reply.phase is ReplyPhase.FAILED and not reply.retryable)


def _now() -> float:
    return asyncio.get_running_loop().time()
