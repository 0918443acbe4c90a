"""Pins: the policy version from which a group is sampled. The first pin counts and never changes (KV `pins`).

The orchestrator pins evaluation groups, and in strict mode all groups, before it publishes their tasks. This
role never pins those groups: a missing pin is an error, so that no group is sampled from a wrong version.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

from marlaas_api import subjects, wire
from marlaas_api.bus import Bucket, Bus, RevisionConflict
from marlaas_api.errors import Retryable
from marlaas_api.failpoints import failpoint
from marlaas_api.messages import GenerateRequest, JobDocument, Pin
from marlaas_api.names import group_token

_PINS_KEPT = 65_536


class PinMissing(Retryable):
    """The orchestrator has not pinned this group, and only the orchestrator may."""


def pinned_by_orchestrator(document: JobDocument, group: str) -> bool:
    """Return whether only the orchestrator pins a group: strict training groups and evaluation groups.

    Raises ValueError if the group's name is not valid (`names.group_token`).
    """
    return document.spec.training.max_staleness == 0 or group_token(group).startswith("e")


class Pins:
    """Cache of pins; creates missing ones. Concurrent requests for one pin share one bus call."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._bucket: Bucket | None = None
        self._known: OrderedDict[str, int] = OrderedDict()
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def knows(self, request: GenerateRequest) -> bool:
        """Return whether the group's pin is in memory."""
        return _key(request) in self._known

    async def version(
        self, request: GenerateRequest, document: JobDocument, newest: Callable[[], Awaitable[int]]
    ) -> int:
        """Return the group's pinned version; pin `newest()` if there is no pin yet.

        Raises PinMissing, BusUnavailable, and errors of `newest`.
        """
        key = _key(request)
        if (known := self._known.get(key)) is not None:
            return known
        lock = self._asking.setdefault(key, asyncio.Lock())
        async with lock:
            if key not in self._known:
                self._remember(key, await self._ask(key, request, document, newest))
            return self._known[key]

    async def _ask(
        self, key: str, request: GenerateRequest, document: JobDocument, newest: Callable[[], Awaitable[int]]
    ) -> int:
        bucket = self._bucket = self._bucket or await self._bus.bucket(subjects.PINS)
        if (pin := await _read(bucket, key)) is not None:
            return pin.version
        if pinned_by_orchestrator(document, request.group):
            raise PinMissing(
                f"group {request.group} of agent {request.agent} has no pin yet; the orchestrator makes it"
            )
        wanted = Pin(version=await newest())
        try:
            await bucket.create(key, wire.encode(wanted))
        except RevisionConflict:
            if (pin := await _read(bucket, key)) is not None:
                return pin.version
            raise PinMissing(f"the pin of group {request.group} vanished") from None
        failpoint("rollout.pin.after_create")
        return wanted.version

    def _remember(self, key: str, version: int) -> None:
        self._known[key] = version
        if len(self._known) > _PINS_KEPT:
            self._known.popitem(last=False)


def _key(request: GenerateRequest) -> str:
    return subjects.pin_key(request.namespace, request.job, request.agent, request.group)


async def _read(bucket: Bucket, key: str) -> Pin | None:
    entry = await bucket.get(key)
    return None if entry is None or entry.data is None else wire.decode_as(Pin, entry.data)
