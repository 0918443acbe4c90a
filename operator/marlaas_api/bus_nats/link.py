"""A connection to NATS that survives restarts of the server.

It implements requests, answers and subscriptions, without JetStream. nats-py 2.16 reconnects and resubscribes. This
module adds three properties:

- A request fails when the connection breaks, not at its deadline.
- Nothing is buffered during an outage, because a write whose caller gave up must not happen minutes later.
- A refused subject fails the call that used it (`refusals`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from itertools import count

from marlaas_api.bus import BusRefused, BusUnavailable
from marlaas_api.bus_nats.client import NatsClient, errors, prepare_transport, speaking_nats, translated
from marlaas_api.bus_nats.dial import Dial
from marlaas_api.bus_nats.refusals import Refusals
from marlaas_api.bus_nats.routes import Incoming, Route, Routes, one_answer
from marlaas_api.bus_nats.verdicts import Lost

HEADER_ROOM_BYTES = 4096

logger = logging.getLogger("marlaas.bus")


# Ends a subscription without waiting for the server; during an outage there is nothing to end.
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
        """Connect; wait up to `timeout_s` for a server that does not run yet. Raises BusUnavailable, BusRefused."""
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
        """Flush, then disconnect; idempotent. Every later call raises BusRefused."""
        if self._end is not None and self._client.is_closed:
            return
        self._finish(BusRefused(f"this connection to NATS at {self._where} is closed"))
        with suppress(errors.Error, OSError, TimeoutError):
            if self._client.is_connected:
                await self._client.flush(1)
        # AssertionError: nats-py asserts in close() that connect() has parsed the URL.
        with suppress(errors.Error, OSError, AssertionError):
            await self._client.close()

    @property
    def max_payload_bytes(self) -> int:
        """The server's limit minus room for headers, which count as payload.

        For a larger message the server closes the connection for good.
        """
        return int(self._client.max_payload) - HEADER_ROOM_BYTES

    def new_inbox(self) -> str:
        """Return a new subject below this connection's inbox prefix."""
        return str(self._client.new_inbox())

    async def ready(self, deadline: float) -> None:
        """Wait until connected. Raises BusUnavailable at the deadline, BusRefused if the connection is closed for good."""
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
        """Send a request and wait for one answer. Raises Lost, BusUnavailable, BusRefused."""
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
        """Return the deadline of a call that begins now."""
        return self._loop.time() + self._dial.answer_s

    async def ask(self, subject: str, data: bytes = b"") -> Incoming:
        """Send a request that is safe to repeat; if the connection breaks, send it again until the usual deadline."""
        deadline = self.deadline()
        while True:
            with suppress(Lost):
                return await self.request(subject, data, deadline)

    async def send(self, subject: str, data: bytes, reply: str = "") -> None:
        """Publish without waiting for an answer. Raises SubjectForbidden if the subject was refused before."""
        await self.ready(self.deadline())
        self._refusals.check(subject)
        await self._emit(subject, data, reply, None)

    def open_route(self, route: Route, reply: str | None = None) -> str:
        """Register a route for a request's answers, and for its refusal or the end of the connection; return the reply subject.

        Answers that carry other subjects (deliveries of a consumer) need a separate subscription to `reply`.
        """
        reply = reply or f"{self._inbox}.{next(self._tokens):x}"
        self._routes.open(reply, route)
        return reply

    def close_route(self, reply: str) -> None:
        """Remove the route of a reply subject; no error if there is none."""
        self._routes.close(reply)

    async def subscribe(self, route: Route, queue: str = "", *, confirmed: bool = True) -> Unsubscribe:
        """Subscribe a route to its subject. Raises Lost, BusRefused.

        confirmed: wait until the server has the subscription, so that no message after the return is missed.
        """
        await self.ready(self.deadline())
        failures: list[Exception] = []

        async def arrive(message: Incoming) -> None:
            route.receive(message)

        async def unsubscribe() -> None:
            self._refusals.subscriptions.pop(route, None)
            with suppress(errors.Error, OSError):
                await inner.unsubscribe()

        self._refusals.subscriptions[route] = failures
        try:
            # No limit on pending bytes: requests limit their answers themselves, and a dropped answer would be lost silently.
            inner = await self._client.subscribe(route.subject, queue=queue, cb=arrive, pending_bytes_limit=0)
        except (errors.Error, OSError) as error:
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
        """Nak a claimed message, so that the server delivers it to another client now.

        Does not wait for the server. An outage has the same effect, after the ack wait.
        """
        with suppress(errors.Error, OSError):
            await self._client.publish(message.reply, b"-NAK")

    @property
    def connected(self) -> bool:
        """Whether the client is connected now."""
        return self._end is None and self._up.is_set() and bool(self._client.is_connected)

    async def _connect(self, timeout_s: float) -> None:
        callbacks = {
            "error_cb": self._on_error,
            "disconnected_cb": self._on_disconnected,
            "reconnected_cb": self._on_reconnected,
            "closed_cb": self._on_closed,
        }
        options = {name: speaking_nats(value) for name, value in self._dial.options.items()}
        prepare_transport(self._dial.url)
        attempt = asyncio.ensure_future(self._client.connect(**options, **callbacks))
        try:
            rejected = self._refusals.rejected
            await asyncio.wait({attempt, rejected}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if rejected.done():
                raise rejected.result()
            if not attempt.done():
                raise BusUnavailable(self._refusals.unreachable())
            attempt.result()
        except (errors.Error, ValueError, ImportError) as error:
            raise BusRefused(f"cannot connect to NATS at {self._where}: {error}") from error
        finally:
            attempt.cancel()
            await asyncio.wait({attempt})

    async def _confirm(self, route: Route, confirmed: bool) -> None:
        """Wait until the server has a subscription; return at once if not `confirmed`."""
        try:
            for _ in range(2 if confirmed else 0):
                # Twice, because nats-py sends a ping at once but buffers other commands for a moment.
                await self._client.flush(self._dial.answer_s)
        except (errors.Error, OSError) as error:
            raise translated(error, f'listen to "{route.subject}"') from error

    async def _emit(self, subject: str, data: bytes, reply: str, headers: Mapping[str, str] | None) -> None:
        if len(data) > self.max_payload_bytes:
            raise BusRefused(f'NATS: {len(data)} bytes for "{subject}" exceed the {self.max_payload_bytes} that fit')
        try:
            await self._client.publish(subject, data, reply, headers)
        except (errors.Error, OSError) as error:
            raise translated(error, f'publish to "{subject}"') from error

    def _answer(self, message: Incoming) -> None:
        route = self._routes.find(message.subject)
        if route is not None:
            route.receive(message)

    async def _on_error(self, error: Exception) -> None:
        connected = self._up.is_set()
        known = self._refusals.hear(error, connected=connected)
        if connected and not known and not isinstance(error, errors.StaleConnectionError | OSError):
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
