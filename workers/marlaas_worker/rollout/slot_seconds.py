"""Seconds for which the adapter versions of each agent had slots of this engine. Pure; the caller passes the clock."""

from collections.abc import Collection

from marlaas_api.names import AdapterRef


class SlotSeconds:
    """Totals since the role's start, by job uid and agent.

    A version counts from the begin of its load until its slot is free, while its job is served: a slot that a version keeps
    after that, because nothing else needs it, is charged to nobody.
    """

    def __init__(self) -> None:
        self._ended: dict[tuple[str, str], float] = {}
        self._held: dict[str, tuple[str, str]] = {}
        self._began: dict[str, float] = {}

    def begin(self, adapter: AdapterRef, now: float) -> None:
        """Note that a version of a served job has taken a slot."""
        self._held[adapter.engine_name] = adapter.uid, adapter.agent
        self._began[adapter.engine_name] = now

    def serve(self, uids: Collection[str], now: float) -> None:
        """Note which jobs are served from now on: admitted, and not deleted."""
        for name, (uid, _) in self._held.items():
            if uid in uids:
                self._began.setdefault(name, now)
            else:
                self._count(name, now)

    def end(self, name: str, now: float) -> None:
        """Note that a version's slot is free; does nothing if it was already. name: of the version in the engine."""
        self._count(name, now)
        self._held.pop(name, None)

    def _count(self, name: str, now: float) -> None:
        if (began := self._began.pop(name, None)) is not None:
            agent = self._held[name]
            self._ended[agent] = self._ended.get(agent, 0.0) + now - began

    def end_all(self, now: float) -> None:
        """Note that all slots are free, because the engine has stopped."""
        for name in list(self._held):
            self.end(name, now)

    def totals(self, now: float) -> dict[str, dict[str, float]]:
        """Return the totals up to now."""
        totals: dict[str, dict[str, float]] = {}
        current = ((self._held[name], now - began) for name, began in self._began.items())
        for (uid, name), seconds in (*self._ended.items(), *current):
            agents = totals.setdefault(uid, {})
            agents[name] = agents.get(name, 0.0) + seconds
        return totals

    def forget(self, uids: Collection[str]) -> None:
        """Remove the totals of jobs that are gone."""
        self._ended = {agent: seconds for agent, seconds in self._ended.items() if agent[0] not in uids}
        self._held = {name: agent for name, agent in self._held.items() if agent[0] not in uids}
        self._began = {name: began for name, began in self._began.items() if name in self._held}
