"""Which answer belongs to whom: the bookkeeping of open requests. It knows no connection."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


class Incoming(Protocol):
    """A message as nats-py hands it over."""

    subject: str
    reply: str
    data: bytes
    headers: Mapping[str, str] | None


def status(message: Incoming) -> str:
    """The status of a message that the server itself sent (`404`, `503`, ...), else the empty string."""
    return (message.headers or {}).get("Status", "")


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Who gets what arrives for one request or subscription on `subject`, and who hears that no more will come."""

    subject: str
    receive: Callable[[Incoming], None]
    fail: Callable[[Exception], None]


class Routes:
    """Open routes by their reply subject."""

    def __init__(self) -> None:
        self._open: dict[str, Route] = {}

    def open(self, reply: str, route: Route) -> None:
        """Begin."""
        self._open[reply] = route

    def close(self, reply: str) -> None:
        """End; no error when it has ended."""
        self._open.pop(reply, None)

    def find(self, reply: str) -> Route | None:
        """The route of a reply subject."""
        return self._open.get(reply)

    def all(self) -> list[Route]:
        """Every open route."""
        return list(self._open.values())

    def fail(self, error: Exception) -> None:
        """End all routes: no answer will come."""
        routes, self._open = self._open, {}
        for route in routes.values():
            route.fail(error)


def one_answer(subject: str) -> tuple[asyncio.Future[Incoming | Exception], Route]:
    """A route for a single answer, and the future that gets it, or why there is none.

    The failure is a result, not an exception: asyncio complains of exceptions that nobody fetched, and nobody has to.
    """
    answer: asyncio.Future[Incoming | Exception] = asyncio.get_running_loop().create_future()

    def settle(outcome: Incoming | Exception) -> None:
        if not answer.done():
            answer.set_result(outcome)

    return answer, Route(subject, settle, settle)
