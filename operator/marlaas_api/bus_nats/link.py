"""A connection to NATS that outlives its server.

It knows requests, answers and subscriptions, nothing of JetStream. nats-py 2.16 reconnects and resubscribes; what is ours:
a request fails the moment the connection breaks (rather than at its deadline), nothing is buffered while there is none (a
write that was given up must not happen minutes later), and a refused subject fails the caller who used it (`refusals`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from itertools import count

import nats.errors

from marlaas_api.bus import BusRefused, BusUnavailable
from marlaas_api.bus_nats.client import NatsClient, speaking_nats, translated
from marlaas_api.bus_nats.dial import Dial
from marlaas_api.bus_nats.refusals import Refusals
from marlaas_api.bus_nats.routes import Incoming, Route, Routes, one_answer
from marlaas_api.bus_nats.verdicts import Lost

HEADER_ROOM_BYTES = 4096

logger = logging.getLogger("marlaas.bus")


# Ends a subscription; never waits, and an outage does the same.
Unsubscribe = Callable[[], Awaitable[None]]


class Link:
    """One connection. Deadlines are in the running loop's time."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._where = dial.where
        self._loop = asyncio.get_running_loop()
        self._client = NatsClient()
        self._up = asyncio.Event()
        self._routes = Routes()
        self._refusals = Refusals(dial, self._routes)
        self._tokens = count()
        self.num_breaks = 0
        self._inbox = ""
        self._end: BusRefused | None = None

    async def open(self, timeout_s: float) -> None:
        """Connect; a server that is not there yet is waited for. Raises BusUnavailable, BusRefused."""
        try:
            await self._connect(timeout_s)
            self._inbox = self._client.new_inbox()
            self._up.set()
            await self.subscribe(Route(f"{self._inbox}.*", self._answer, self._refusals.reject))
            if self._refusals.rejected.done():
                raise self._refusals.rejected.result()
            self._refusals.opening = False
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
                raise BusUnavailable(self._refusals.unreachable()) from None

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
        self._refusals.check(subject)
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
            self._refusals.subscriptions.pop(route, None)
            with suppress(nats.errors.Error, OSError):
                await inner.unsubscribe()

        self._refusals.subscriptions[route] = failures
        try:
            # No bound on bytes: what is asked for is bounded by who asks, and a dropped answer would be a hole.
            inner = await self._client.subscribe(route.subject, queue=queue, cb=arrive, pending_bytes_limit=0)
        except (nats.errors.Error, OSError) as error:
            self._refusals.subscriptions.pop(route, None)
            raise translated(error, f'listen to "{route.subject}"') from error
        try:
            await self._confirm(route, confirmed)
            if failures:
                raise failures[0]
        except BaseException:
            await unsubscribe()
            raise
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
        options = {name: speaking_nats(value) for name, value in self._dial.options.items()}
        attempt = asyncio.ensure_future(self._client.connect(**options, **callbacks))
        try:
            rejected = self._refusals.rejected
            await asyncio.wait({attempt, rejected}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if rejected.done():
                raise rejected.result()
            if not attempt.done():
                raise BusUnavailable(self._refusals.unreachable())
            attempt.result()
        except (nats.errors.Error, ValueError, ImportError) as error:
            raise BusRefused(f"cannot connect to NATS at {self._where}: {error}") from error
        finally:
            attempt.cancel()
            await asyncio.wait({attempt})

    async def _confirm(self, route: Route, confirmed: bool) -> None:
        """Wait until the server has taken a subscription."""
        try:
            for _ in range(2 if confirmed else 0):
                # Twice: nats-py writes a ping at once, and commands a little later.
                await self._client.flush(self._dial.answer_s)
        except (nats.errors.Error, OSError) as error:
            raise translated(error, f'listen to "{route.subject}"') from error

    async def _emit(self, subject: str, data: bytes, reply: str, headers: Mapping[str, str] | None) -> None:
        if len(data) > self.max_payload_bytes:
            raise BusRefused(f'NATS: {len(data)} bytes for "{subject}" exceed the {self.max_payload_bytes} that fit')
        try:
            await self._client.publish(subject, data, reply, headers)
        except (nats.errors.Error, OSError) as error:
            raise translated(error, f'publish to "{subject}"') from error

    def _answer(self, message: Incoming) -> None:
        route = self._routes.find(message.subject)
        if route is not None:
            route.receive(message)

    async def _on_error(self, error: Exception) -> None:
        connected = self._up.is_set()
        known = self._refusals.hear(error, connected=connected)
        if connected and not known and not isinstance(error, nats.errors.StaleConnectionError | OSError):
            logger.error("%s: %s", self._dial.name, error)

    async def _on_disconnected(self) -> None:
        if self._end is None:
            logger.warning("%s: lost the connection to NATS at %s", self._dial.name, self._where)
        self._up.clear()
        self.num_breaks += 1
        self._routes.fail(Lost(f"the connection to NATS at {self._where} broke"))

    async def _on_reconnected(self) -> None:
        logger.warning("%s: connected to NATS at %s again", self._dial.name, self._where)
        self._refusals.forget()
        self._up.set()

    async def _on_closed(self) -> None:
        why = self._client.last_error or self._refusals.last
        self._finish(BusRefused(f"NATS at {self._where} closed this connection for good: {why}"))

    def _finish(self, end: BusRefused) -> None:
        if self._end is None:
            self._end = end
            self._up.set()
            self._routes.fail(end)
            for route in list(self._refusals.subscriptions):
                route.fail(end)
