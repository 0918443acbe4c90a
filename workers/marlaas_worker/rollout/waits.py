"""Requests that wait for a version to be served, in order of arrival; and the versions that must yield their slots to them."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from marlaas_api.names import AdapterRef


@dataclass(slots=True)
class _Wait:
    """All requests that wait for one version. num: their number."""

    adapter: AdapterRef
    num: int = 0
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class Waits:
    """Versions that requests wait for, in order of the first request. `joined` is called for each new wait."""

    def __init__(self, joined: Callable[[], None]) -> None:
        self._joined = joined
        self._waits: dict[str, _Wait] = {}

    def __bool__(self) -> bool:
        return bool(self._waits)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._waits))

    def adapters(self) -> list[AdapterRef]:
        """Return the versions that requests wait for."""
        return [wait.adapter for wait in self._waits.values()]

    async def wait(self, adapter: AdapterRef) -> None:
        """Return when the version is settled: served or refused."""
        name = adapter.engine_name
        wait = self._waits.setdefault(name, _Wait(adapter))
        wait.num += 1
        self._joined()
        try:
            await wait.settled.wait()
        finally:
            wait.num -= 1
            if not wait.num and self._waits.get(name) is wait:
                del self._waits[name]

    def settle(self, name: str) -> None:
        """Wake the requests that wait for a version, so that they check it again."""
        wait = self._waits.pop(name, None)
        if wait is not None:
            wait.settled.set()


def to_yield(running: Iterable[str], resident: Iterable[str], waiting: Iterable[str]) -> frozenset[str]:
    """Choose running versions that take no new requests for now: one for each waiting version without a slot.

    The versions that have been served longest come first. Otherwise a version that always has requests would
    never free its slot.
    """
    have = set(resident)
    homeless = sum(name not in have for name in waiting)
    return frozenset(list(running)[:homeless])
