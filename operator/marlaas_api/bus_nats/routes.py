"""Assignment of answers to open requests. This module has no connection."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


class Incoming(Protocol):
    """A message as nats-py delivers it."""

    @property
    def subject(self) -> str: ...
    @property
    def reply(self) -> str: ...
    @property
    def data(self) -> bytes: ...
    @property
    def headers(self) -> Mapping[str, str] | None: ...


def status(message: Incoming) -> str:
    """Return the status of a message that the server itself sent (`404`, `503`, ...), else the empty string."""
    return (message.headers or {}).get("Status", "")


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """The callbacks of one request or subscription on `subject`: for each message, and for the error that ends it."""

    subject: str
    receive: Callable[[Incoming], None]
    fail: Callable[[Exception], None]


class Routes:
    """The open routes, by reply subject."""

    def __init__(self) -> None:
        self._open: dict[str, Route] = {}

    def open(self, reply: str, route: Route) -> None:
        """Add a route."""
        self._open[reply] = route

    def close(self, reply: str) -> None:
        """Remove a route; no error if there is none."""
        self._open.pop(reply, None)

    def find(self, reply: str) -> Route | None:
        """Return the route of a reply subject; None if there is none."""
        return self._open.get(reply)

    def all(self) -> list[Route]:
        """Return every open route."""
        return list(self._open.values())

    def fail(self, error: Exception) -> None:
        """Remove all routes and give each the error."""
        routes, self._open = self._open, {}
        for route in routes.values():
            route.fail(error)


def one_answer(subject: str) -> tuple[asyncio.Future[Incoming | Exception], Route]:
    """Return a route for a single answer, and the future that gets the answer or the error.

    The error is the future's result, not its exception, because asyncio logs exceptions that are never retrieved.
    """
    answer: asyncio.Future[Incoming | Exception] = asyncio.get_running_loop().create_future()

    def settle(outcome: Incoming | Exception) -> None:
        if not answer.done():
            answer.set_result(outcome)

    return answer, Route(subject, settle, settle)
