"""A connection to NATS that outlives its server, and the only module that imports `nats`.

It knows requests, answers and subscriptions, nothing of JetStream. nats-py 2.16 reconnects and resubscribes; what is ours:
a request fails the moment the connection breaks (rather than at its deadline), nothing is buffered while there is none (a
write that was given up must not happen minutes later), and a refused subject fails the caller who used it (nats-py only tells
a callback, and the call times out).
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

import nats.errors
from nats.aio.client import Client

from marlaas_api.bus import BusRefused, BusUnavailable
from marlaas_api.bus_nats.dial import Dial
from marlaas_api.bus_nats.routes import Incoming, Route, Routes, one_answer

HEADER_ROOM_BYTES = 4096
_REFUSED = re.compile(r'permissions violation for (publish|subscription)[^"]*"([^"]+)"')
_REJECTED = ("authorization", "authentication")
_EXPIRED = ("authentication expired", "authentication revoked")
_NEVER = (nats.errors.BadSubjectError, nats.errors.BadHeaderError, nats.errors.MaxPayloadError)

logger = logging.getLogger("marlaas.bus")


class Lost(BusUnavailable):
    """The connection broke before the answer came; whether the server acted on the request is not known."""


class Forbidden(BusRefused):
    """This user may not use that subject."""


class _Client(Client):  # type: ignore[misc]
    """nats-py 2.16 takes an expired token for the end; it is the moment to connect with the renewed one. And it leaves open what the
    server turned away."""

    async def _process_err(self, err_msg: str) -> None:
        if any(words in err_msg.lower() for words in _EXPIRED):
            await self._process_op_err(nats.errors.StaleConnectionError())
        else:
            await super()._process_err(err_msg)

    async def _process_connect_init(self) -> None:
        try:
            await super()._process_connect_init()
        except BaseException:
            if self._transport is not None:
                self._transport.close()
            raise


# Ends a subscription; never waits, and an outage does the same.
Unsubscribe = Callable[[], Awaitable[None]]


class Link:
    """One connection. Deadlines are in the running loop's time."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._where = dial.where
        self._loop = asyncio.get_running_loop()
        self._client = _Client()
        self._up = asyncio.Event()
        self._rejected: asyncio.Future[BusRefused] = self._loop.create_future()
        self._opening = True
        self._complained = False
        self._routes = Routes()
        self._tokens = count()
        self.num_breaks = 0
        self._subscriptions: dict[Route, list[Exception]] = {}
        self._refused: dict[str, BusRefused] = {}
        self._inbox = ""
        self._end: BusRefused | None = None
        self._last_error: Exception | None = None

    async def open(self, timeout_s: float) -> None:
        """Connect; a server that is not there yet is waited for. Raises BusUnavailable, BusRefused."""
        try:
            await self._connect(timeout_s)
            self._inbox = self._client.new_inbox()
            self._up.set()
            await self.subscribe(Route(f"{self._inbox}.*", self._answer, self._reject))
            if self._rejected.done():
                raise self._rejected.result()
            self._opening = False
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Send what is left, then disconnect; idempotent. Every later call raises BusRefused."""
        if self._end is not None and self._client.is_closed:
            return
        self._finish(BusRefused(f"this connection to NATS at {self._where} is closed"))
        with suppress(nats.errors.Error, OSError, TimeoutError):
            if self._client.is_connected:
                await self._client.flush(1)
        # nats-py asserts that its connect got past reading the URL.
        with suppress(nats.errors.Error, OSError, AssertionError):
            await self._client.close()

    @property
    def max_payload_bytes(self) -> int:
        """The server's limit less room for headers, which count as payload: beyond it the server hangs up for good."""
        return int(self._client.max_payload) - HEADER_ROOM_BYTES

    def new_inbox(self) -> str:
        """A subject of our own."""
        return str(self._client.new_inbox())

    async def ready(self, deadline: float) -> None:
        """Wait until connected. Raises BusUnavailable at the deadline, BusRefused if it never will be."""
        while not self.connected:
            if self._end is not None:
                raise self._end
            self._up.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._up.wait()
            except TimeoutError:
                raise BusUnavailable(self._unreachable()) from None

    async def request(
        self, subject: str, data: bytes, deadline: float, headers: Mapping[str, str] | None = None
    ) -> Incoming:
        """Ask and wait for one answer. Raises Lost, BusUnavailable, BusRefused."""
        await self.ready(deadline)
        answer, route = one_answer(subject)
        timer = self._loop.call_at(deadline, route.fail, BusUnavailable(f'NATS: no answer on "{subject}" in time'))
        reply = self.open_route(route)
        try:
            await self._emit(subject, data, reply, headers)
            outcome = await answer
        finally:
            timer.cancel()
            self.close_route(reply)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def deadline(self) -> float:
        """By when a call that begins now has to have its answer."""
        return self._loop.time() + self._dial.answer_s

    async def ask(self, subject: str, data: bytes = b"") -> Incoming:
        """A request that may be repeated: one that was lost is sent again, until the usual deadline."""
        deadline = self.deadline()
        while True:
            with suppress(Lost):
                return await self.request(subject, data, deadline)

    async def send(self, subject: str, data: bytes, reply: str = "") -> None:
        """Publish without an answer. A subject that was refused before is refused here."""
        await self.ready(self.deadline())
        if subject.lower() in self._refused:
            raise self._refused[subject.lower()]
        await self._emit(subject, data, reply, None)

    def open_route(self, route: Route, reply: str | None = None) -> str:
        """Return the reply subject for a request; its route is told of refusals and of the end of the connection.

        Answers that carry other subjects (deliveries of a consumer) need a subscription to `reply` of their own.
        """
        reply = reply or f"{self._inbox}.{next(self._tokens):x}"
        self._routes.open(reply, route)
        return reply

    def close_route(self, reply: str) -> None:
        """Expect no more answers; no error when it has ended."""
        self._routes.close(reply)

    async def subscribe(self, route: Route, queue: str = "", *, confirmed: bool = True) -> Unsubscribe:
        """Hear everything on the route's subject; `confirmed`: from the moment this returns. Raises Lost, BusRefused."""
        await self.ready(self.deadline())
        failures: list[Exception] = []

        async def arrive(message: Incoming) -> None:
            route.receive(message)

        async def unsubscribe() -> None:
            self._subscriptions.pop(route, None)
            with suppress(nats.errors.Error, OSError):
                await inner.unsubscribe()

        self._subscriptions[route] = failures
        try:
            # No bound on bytes: what is asked for is bounded by who asks, and a dropped answer would be a hole.
            inner = await self._client.subscribe(route.subject, queue=queue, cb=arrive, pending_bytes_limit=0)
            for _ in range(2 if confirmed else 0):
                # Twice: nats-py writes a ping at once, and commands a little later.
                await self._client.flush(self._dial.answer_s)
        except (nats.errors.Error, OSError) as error:
            self._subscriptions.pop(route, None)
            raise _translated(error, f'listen to "{route.subject}"') from error
        if failures:
            await unsubscribe()
            raise failures[0]
        return unsubscribe

    async def hand_back(self, message: Incoming) -> None:
        """Let the server deliver a claimed message to somebody else now; never waits, and an outage does the same."""
        with suppress(nats.errors.Error, OSError):
            await self._client.publish(message.reply, b"-NAK")

    @property
    def connected(self) -> bool:
        """There is a connection right now."""
        return self._end is None and self._up.is_set() and bool(self._client.is_connected)

    async def _connect(self, timeout_s: float) -> None:
        callbacks = {
            "error_cb": self._on_error,
            "disconnected_cb": self._on_disconnected,
            "reconnected_cb": self._on_reconnected,
            "closed_cb": self._on_closed,
        }
        options = {name: _speaking_nats(value) for name, value in self._dial.options.items()}
        attempt = asyncio.ensure_future(self._client.connect(**options, **callbacks))
        try:
            await asyncio.wait({attempt, self._rejected}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._rejected.done():
                raise self._rejected.result()
            if not attempt.done():
                raise BusUnavailable(self._unreachable())
            attempt.result()
        except (nats.errors.Error, ValueError, ImportError) as error:
            raise BusRefused(f"cannot connect to NATS at {self._where}: {error}") from error
        finally:
            attempt.cancel()
            await asyncio.wait({attempt})

    async def _emit(self, subject: str, data: bytes, reply: str, headers: Mapping[str, str] | None) -> None:
        if len(data) > self.max_payload_bytes:
            raise BusRefused(f'NATS: {len(data)} bytes for "{subject}" exceed the {self.max_payload_bytes} that fit')
        try:
            await self._client.publish(subject, data, reply, headers)
        except (nats.errors.Error, OSError) as error:
            raise _translated(error, f'publish to "{subject}"') from error

    def _answer(self, message: Incoming) -> None:
        route = self._routes.find(message.subject)
        if route is not None:
            route.receive(message)

    async def _on_error(self, error: Exception) -> None:
        self._last_error = error
        text = str(error).lower()
        refused = _REFUSED.search(text)
        if refused is not None:
            self._refuse(*refused.groups())
        elif not self._up.is_set() and any(word in text for word in _REJECTED):
            self._turned_away(error)
        elif self._up.is_set() and not isinstance(error, nats.errors.StaleConnectionError | OSError):
            logger.error("%s: %s", self._dial.name, error)

    def _refuse(self, act: str, subject: str) -> None:
        """Tell whoever used the subject (the server quotes it; nats-py turns it to lower case)."""
        users = list(self._subscriptions) if act == "subscription" else self._routes.all()
        hit = [route for route in users if route.subject.lower() == subject]
        name = hit[0].subject if hit else subject
        verb = "listen" if act == "subscription" else "publish"
        error = Forbidden(f'NATS does not let {self._dial.name} {verb} to "{name}": grant that permission to its user')
        logger.error("%s", error)
        for route in hit:
            self._subscriptions.get(route, []).append(error)
            route.fail(error)
        if act == "publish" and len(self._refused) < 1000:
            self._refused[subject] = error

    def _turned_away(self, error: Exception) -> None:
        """The server does not want this user. Whoever opens the connection is told; later the log, once: newer credentials may come."""
        text = self._rejection(error)
        if self._opening:
            self._reject(BusRefused(text))
        elif not self._complained:
            self._complained = True
            logger.error("%s", text)

    def _rejection(self, error: Exception) -> str:
        identity = self._dial.identity
        why = "check its credentials" if identity is None else identity.complaint()
        return f"NATS at {self._where} rejects {self._dial.name}: {error}: {why}"

    def _reject(self, error: Exception) -> None:
        if not self._rejected.done() and isinstance(error, BusRefused):
            self._rejected.set_result(error)

    async def _on_disconnected(self) -> None:
        if self._end is None:
            logger.warning("%s: lost the connection to NATS at %s", self._dial.name, self._where)
        self._up.clear()
        self.num_breaks += 1
        self._routes.fail(Lost(f"the connection to NATS at {self._where} broke"))

    async def _on_reconnected(self) -> None:
        logger.warning("%s: connected to NATS at %s again", self._dial.name, self._where)
        self._refused.clear()
        self._complained = False
        self._up.set()

    async def _on_closed(self) -> None:
        why = self._client.last_error or self._last_error
        self._finish(BusRefused(f"NATS at {self._where} closed this connection for good: {why}"))

    def _finish(self, end: BusRefused) -> None:
        if self._end is None:
            self._end = end
            self._up.set()
            self._routes.fail(end)
            for route in list(self._subscriptions):
                route.fail(end)

    def _unreachable(self) -> str:
        if self._last_error is not None and any(word in str(self._last_error).lower() for word in _REJECTED):
            return self._rejection(self._last_error)
        why = f" ({self._last_error})" if self._last_error is not None else ""
        return f"NATS at {self._where} cannot be reached{why}: is it running?"


def _speaking_nats(option: Any) -> Any:
    """Callbacks that raise what nats-py expects of them: anything else would end its reconnecting without a word."""
    if not callable(option):
        return option

    def call(*arguments: Any) -> Any:
        try:
            return option(*arguments)
        except BusRefused as error:
            raise nats.errors.Error(str(error)) from None

    return call


def _translated(error: Exception, action: str) -> BusUnavailable | BusRefused:
    kind = BusRefused if isinstance(error, _NEVER) else Lost
    return kind(f"NATS: cannot {action}: {str(error).removeprefix('nats: ')}")
