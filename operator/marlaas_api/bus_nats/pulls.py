"""Pull requests for messages of a consumer, and their inboxes.

Delivered messages keep their own subjects, so that each open request needs a separate inbox. Inboxes are reused.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

from marlaas_api.bus_nats.layout import nanoseconds
from marlaas_api.bus_nats.link import Link, Unsubscribe
from marlaas_api.bus_nats.routes import Incoming, Route, status

_IDLE_S = 60.0


class Pull:
    """An inbox for one pull request at a time. `sink` gets every message, also after the caller has stopped waiting."""

    def __init__(self, link: Link, call: str, sink: Callable[[Incoming], None]) -> None:
        self.sink = sink
        self.ended: str | None = None
        self.failure: Exception | None = None
        self._link = link
        self.call = call
        self._left = 0
        self._inbox = link.new_inbox()
        self._unsubscribe: Unsubscribe | None = None
        self._news = asyncio.Event()

    async def ask(self, batch: int, expires_s: float, *, no_wait: bool) -> None:
        """Request up to `batch` messages. Raises BusUnavailable, BusRefused."""
        route = Route(self.call, self._receive, self._fail)
        if self._unsubscribe is None:
            self._unsubscribe = await self._link.subscribe(replace(route, subject=self._inbox), confirmed=False)
        self.ended, self.failure, self._left = None, None, batch
        self._news.clear()
        request: dict[str, object] = {"batch": batch, "no_wait": no_wait}
        if expires_s > 0:
            request["expires"] = nanoseconds(expires_s)
        self._link.open_route(route, self._inbox)
        await self._link.send(self.call, json.dumps(request).encode(), self._inbox)

    @property
    def over(self) -> bool:
        """Whether the request has ended: no further message will arrive."""
        return self.ended is not None or self.failure is not None or self._left <= 0

    async def news(self, until: float) -> bool:
        """Wait for a message or the end of the request; False if there was neither before `until` (a time of the loop)."""
        try:
            async with asyncio.timeout_at(until):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True

    async def close(self) -> None:
        """End the request and unsubscribe; the server drops a request without a subscriber."""
        self._link.close_route(self._inbox)
        if self._unsubscribe is not None:
            await self._unsubscribe()

    def _receive(self, message: Incoming) -> None:
        code = status(message)
        if code:
            self.ended = f"{code} {(message.headers or {}).get('Description', '').strip()}"
        else:
            self._left -= 1
            self.sink(message)
        self._news.set()

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self._news.set()


class InboxPool:
    """The idle inboxes of a connection, for reuse by its consumers.

    Consumers come and go with their jobs. An inbox serves the next request for messages of the same consumer; an inbox
    that has been idle for a minute is closed.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._idle: list[tuple[float, Pull]] = []

    async def take(self, call: str, sink: Callable[[Incoming], None]) -> Pull:
        """Return an inbox for a request to this subject."""
        await self._tidy()
        for shelved in self._idle:
            pull = shelved[1]
            if pull.call == call and pull.over:
                self._idle.remove(shelved)
                pull.sink = sink
                return pull
        return Pull(self._link, call, sink)

    def put(self, pull: Pull, sink: Callable[[Incoming], None]) -> None:
        """Return an inbox to the pool; `sink` gets the messages that still arrive."""
        pull.sink = sink
        self._idle.append((_now(), pull))

    async def _tidy(self) -> None:
        while self._idle and _now() - self._idle[0][0] > _IDLE_S:
            await self._idle.pop(0)[1].close()


def _now() -> float:
    return asyncio.get_running_loop().time()
