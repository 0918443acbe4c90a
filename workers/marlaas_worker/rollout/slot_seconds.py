"""Seconds for which the adapter versions of each agent had slots of this engine. Pure; the caller passes the clock."""

from collections.abc import Collection

from marlaas_api.names import AdapterRef


class SlotSeconds:
    """Totals since the role's start, by job uid and agent. A version counts from the begin of its load until its slot is free."""

    def __init__(self) -> None:
        self._ended: dict[tuple[str, str], float] = {}
        self._began: dict[str, tuple[tuple[str, str], float]] = {}

    def begin(self, adapter: AdapterRef, now: float) -> None:
        """Note that a version has taken a slot."""
        self._began[adapter.engine_name] = (adapter.uid, adapter.agent), now

    def end(self, name: str, now: float) -> None:
        """Note that a version's slot is free; does nothing if it was already. name: of the version in the engine."""
        if name in self._began:
            agent, began = self._began.pop(name)
            self._ended[agent] = self._ended.get(agent, 0.0) + now - began

    def end_all(self, now: float) -> None:
        """Note that all slots are free, because the engine has stopped."""
        for name in list(self._began):
            self.end(name, now)

    def totals(self, now: float) -> dict[str, dict[str, float]]:
        """Return the totals up to now."""
        totals: dict[str, dict[str, float]] = {}
        current = ((agent, now - began) for agent, began in self._began.values())
        for (uid, name), seconds in (*self._ended.items(), *current):
            agents = totals.setdefault(uid, {})
            agents[name] = agents.get(name, 0.0) + seconds
        return totals

    def forget(self, uids: Collection[str]) -> None:
        """Remove the totals of jobs that are gone. If their versions still have slots, no job is charged for them."""
        self._ended = {agent: seconds for agent, seconds in self._ended.items() if agent[0] not in uids}
        self._began = {name: one for name, one in self._began.items() if one[0][0] not in uids}
