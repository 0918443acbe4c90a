"""Fault limit of a job: a share of its latest episodes, so that a short outage long ago does not fail it."""

from collections import deque

from marlaas_api.messages import Episode
from marlaas_api.visible import visible


class FaultWatch:
    """The share of faults over the last `window` episodes, once there are `at_least` of them."""

    def __init__(self, window: int, max_share: float, at_least: int) -> None:
        self._recent: deque[bool] = deque(maxlen=window)
        self._max_share = max_share
        self._at_least = at_least
        self._last_text = ""

    def add(self, episode: Episode) -> None:
        """Note an episode; call once per episode."""
        self._recent.append(episode.fault is not None)
        if episode.fault is not None:
            self._last_text = f"{episode.fault.value}: {visible(episode.fault_text)}"

    def verdict(self) -> str | None:
        """Return why the job must fail, with the last fault's text; None while the share is within the limit."""
        if len(self._recent) < self._at_least:
            return None
        share = sum(self._recent) / len(self._recent)
        if share <= self._max_share:
            return None
        return (
            f"{share:.0%} of the last {len(self._recent)} episodes were lost to faults; the last one: {self._last_text}"
        )
