"""Requests for messages of a consumer, and their inboxes.

Messages come under their own subjects, so a request needs an inbox to itself; inboxes are used again.
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
    """An inbox for one request at a time. What arrives goes to `sink`, also after the caller has stopped waiting."""

    def __init__(self, link: Link, call: str, sink: Callable[[Incoming], None]) -> None:
        self.sink = sink
        self.call = call
        self.ended: str | None = None
        self.failure: Exception | None = None
        self._link = link
        self.call = call
        self._left = 0
        self._inbox = link.new_inbox()
        self._unsubscribe: Unsubscribe | None = None
        self._news = asyncio.Event()

    async def ask(self, batch: int, expires_s: float, *, no_wait: bool) -> None:
        """Ask for up to `batch` messages. Raises BusUnavailable, BusRefused."""
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
        """Nothing more will come of this request."""
        return self.ended is not None or self.failure is not None or self._left <= 0

    async def news(self, until: float) -> bool:
        """Wait for a message or the end; False when there was none until then (a time of the loop)."""
        try:
            async with asyncio.timeout_at(until):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True

    async def close(self) -> None:
        """Give up; the server drops a request that nobody listens to."""
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
    """The inboxes of a connection that wait for their next request. Consumers come and go, each job has some: an inbox serves whoever asks for
    messages of the same consumer next, and one that nobody has used for a minute is given up."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._idle: list[tuple[float, Pull]] = []

    async def take(self, call: str, sink: Callable[[Incoming], None]) -> Pull:
        """An inbox for a request to this subject."""
        await self._tidy()
        for shelved in self._idle:
            pull = shelved[1]
            if pull.call == call and pull.over:
                self._idle.remove(shelved)
                pull.sink = sink
                return pull
        return Pull(self._link, call, sink)

    def put(self, pull: Pull, sink: Callable[[Incoming], None]) -> None:
        """Back, for the next; `sink` gets what still comes."""
        pull.sink = sink
        self._idle.append((_now(), pull))

    async def _tidy(self) -> None:
        while self._idle and _now() - self._idle[0][0] > _IDLE_S:
            await self._idle.pop(0)[1].close()


def _now() -> float:
    return asyncio.get_running_loop().time()
