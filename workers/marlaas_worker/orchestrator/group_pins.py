"""Pins of a job's groups: the version of each agent from which a group's turns are sampled. The first pin counts and never changes."""

from collections.abc import Container

from marlaas_api import subjects
from marlaas_api.bus import Bucket, Bus
from marlaas_api.fenced import FencedKey, Overtaken
from marlaas_api.messages import Pin
from marlaas_api.names import JobRef
from marlaas_api.wire import decode_as, encode


class GroupPins:
    """Reads and creates pins of one job, and keeps those of its open groups in memory."""

    def __init__(self, bus: Bus, ref: JobRef) -> None:
        self._bus, self._ref = bus, ref
        self._bucket: Bucket | None = None
        self._known: dict[tuple[str, str], int] = {}

    async def create(self, agent: str, group: str, version: int) -> None:
        """Pin a group before a turn of it can be requested; an existing pin stays."""
        key = FencedKey(await self._opened(), self._key(agent, group))
        try:
            await key.write(encode(Pin(version=version)))
            self._known[agent, group] = version
        except Overtaken:
            await self.version(agent, group)

    async def version(self, agent: str, group: str) -> int | None:
        """Return the version to which a group of an agent is pinned; None if it has no pin."""
        if (agent, group) not in self._known:
            entry = await (await self._opened()).get(self._key(agent, group))
            if entry is None or entry.data is None:
                return None
            self._known[agent, group] = decode_as(Pin, entry.data, f"the Pin of key {entry.key}").version
        return self._known[agent, group]

    def forget(self, open_groups: Container[str]) -> None:
        """Drop the known pins of all other groups."""
        self._known = {key: version for key, version in self._known.items() if key[1] in open_groups}

    async def _opened(self) -> Bucket:
        self._bucket = self._bucket or await self._bus.bucket(subjects.PINS)
        return self._bucket

    def _key(self, agent: str, group: str) -> str:
        return subjects.pin_key(self._ref.namespace, self._ref.name, agent, group)
