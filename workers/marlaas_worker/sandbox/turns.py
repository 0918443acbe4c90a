"""Ask the rollout role for turns, and keep asking until there is one or the time is over.

The request id makes asking twice harmless: whoever has generated it already answers with what is recorded.
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
from marlaas_api.messages import CancelRequest, GenerateReply, GenerateRequest, ReplyPhase
from marlaas_api.wire import BadMessage, decode_as, encode

log = logging.getLogger(__name__)


class TurnFailed(Retryable):
    """No turn came of it, for a reason that lies in the infrastructure; the text is for people."""


class TurnTooLong(Permanent):
    """What the environment appended does not fit into a message."""


@dataclass(frozen=True, slots=True)
class Patience:
    """heard_s: silence after which the same request is sent again (a busy replica beats every second). retry: first and longest pause."""

    heard_s: float = 5.0
    first_retry_s: float = 0.1
    max_retry_s: float = 2.0


PATIENCE = Patience()


class TurnClient:
    """All turns of one supervisor, answered on one inbox. Use as an async context."""

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

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Return the result, waiting at most `request.deadline_s`; who stops waiting earlier cancels the generation.

        Raises:
            TurnFailed: no result in time, or a failure that asking again does not mend.
            TurnTooLong: the request is larger than the bus takes.
        """
        size = len(encode(request))
        if size > self._bus.max_payload_bytes:
            raise TurnTooLong(f"a turn of {size} bytes; at most {self._bus.max_payload_bytes} fit into a message")
        name = names.request_id(request.episode, request.turn)
        waiting = self._waiting[name] = _Waiting()
        deadline = asyncio.get_running_loop().time() + request.deadline_s
        try:
            async with asyncio.timeout_at(deadline):
                return await self._ask(request, deadline, waiting)
        except TimeoutError:
            await self._cancel(request)
            raise TurnFailed(
                f"no turn of agent {request.agent!r} within {request.deadline_s:g} s (turnTimeoutSeconds); "
                f"last: {waiting.last_words}"
            ) from None
        except asyncio.CancelledError:
            await self._cancel(request)
            raise
        finally:
            del self._waiting[name]

    async def _ask(self, request: GenerateRequest, deadline: float, waiting: "_Waiting") -> GenerateReply:
        """Send; send again after silence, or after a pause when it failed for the moment."""
        pause_s = self._patience.first_retry_s
        while True:
            await self._send(request, deadline)
            reply = await waiting.decision(self._patience.heard_s)
            if reply is None:
                continue
            if reply.phase is ReplyPhase.RESULT:
                return reply
            if not reply.retryable:
                raise TurnFailed(f"{reply.replica}: {reply.error}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._patience.max_retry_s)

    async def _send(self, request: GenerateRequest, deadline: float) -> None:
        left_s = deadline - asyncio.get_running_loop().time()
        data = encode(request.model_copy(update={"deadline_s": left_s}))
        subject = subjects.generation(request.namespace, request.job, request.agent)
        try:
            await self._bus.send(subject, data, self._inbox)
        except BusUnavailable as error:
            log.warning("asking for a turn: %s", error)  # silence follows, and then it is sent again

    async def _cancel(self, request: GenerateRequest) -> None:
        message = CancelRequest(
            namespace=request.namespace,
            job=request.job,
            uid=request.uid,
            agent=request.agent,
            episode=request.episode,
        )
        subject = subjects.generation(request.namespace, request.job, request.agent)
        with contextlib.suppress(BusUnavailable):  # it saves work, and nothing depends on it
            await self._bus.send(subject, encode(message))

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
    """What one request has heard."""

    def __init__(self) -> None:
        self.last_words = "nobody answered"
        self._heard: asyncio.Queue[GenerateReply] = asyncio.Queue()

    def hear(self, reply: GenerateReply) -> None:
        self.last_words = f"{reply.replica}: {reply.error or reply.phase.value}"
        self._heard.put_nowait(reply)

    async def decision(self, silence_s: float) -> GenerateReply | None:
        """Return the next result or failure, None after a silence."""
        while True:
            try:
                async with asyncio.timeout(silence_s):
                    reply = await self._heard.get()
            except TimeoutError:
                return None
            if reply.phase in (ReplyPhase.RESULT, ReplyPhase.FAILED):
                return reply
