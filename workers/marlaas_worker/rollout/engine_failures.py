"""Counts the failures of the engine by prompt. A prompt that has ended the engine three times is refused. Does not import vLLM."""

import hashlib
from collections.abc import Set
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from marlaas_api.errors import Permanent
from marlaas_worker.rollout.bounded_cache import BoundedCache

MAX_ENGINE_FAILURES = 3
_MAX_BYTES = 4 << 20
_ENTRY_BYTES = 1024


class EngineKilled(Permanent):
    """The engine failed each time that it ran a prompt. Another try would end it for all tenants again.

    is_sure: between these failures the engine generated for other requests, so the prompt is the cause.
    """

    def __init__(self, text: str, *, is_sure: bool) -> None:
        super().__init__(text)
        self.is_sure = is_sure


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures with a prompt. since: number of requests that the engine had generated at the first one. last: its text."""

    number: int = 0
    since: int = 0
    last: str = ""


class EngineFailures:
    """Failures of this replica's engine by job and prompt.

    Members of a group have the same prompt, and so has another attempt at an episode. All requests with a prompt that run when
    the engine fails count once together. The failures with a prompt are forgotten once it is generated; a request counts its
    own beside them, since the sampled tokens may be the cause.
    """

    def __init__(self) -> None:
        self._found = BoundedCache[Failures](_MAX_BYTES)
        self._num_generated = 0

    def of(self, uid: str, prompt_ids: NDArray[np.int32], own: Failures) -> Failures:
        """Return the failures with a job's prompt, or a request's own if they are more."""
        shared = self._found.get(_key(uid, prompt_ids)) if len(self._found) else None
        return own if shared is None or shared.number < own.number else shared

    def note(self, uid: str, prompt_ids: NDArray[np.int32], known: Failures, own: Failures, text: str) -> Failures:
        """Note a failure, and return the request's own failures. known: those when the request was given to the engine."""
        key, shared = _key(uid, prompt_ids), self._more(known, text)
        found = self._found.get(key)
        if found is None or found.number < shared.number:
            self._found.put(key, shared, _ENTRY_BYTES)
        return self._more(own, text)

    def _more(self, before: Failures, text: str) -> Failures:
        return Failures(before.number + 1, before.since if before.number else self._num_generated, text)

    def generated(self, uid: str, prompt_ids: NDArray[np.int32]) -> None:
        """Note that a prompt was generated."""
        self._num_generated += 1
        if len(self._found):
            self._found.drop(_key(uid, prompt_ids))

    def verdict(self, uid: str, prompt_ids: NDArray[np.int32], found: Failures, turn: str) -> EngineKilled:
        """Return the error of a request whose prompt is not run again.

        If the engine has generated nothing else meanwhile, its failures may have another cause. So the next request with the
        prompt, as of another attempt at the episode, is run once, alone.
        """
        is_sure = self._num_generated > found.since
        if not is_sure:
            once = replace(found, number=MAX_ENGINE_FAILURES - 1)
            self._found.put(_key(uid, prompt_ids), once, _ENTRY_BYTES)
        text = f"the engine failed {found.number} times while it ran the prompt of turn {turn}; last: {found.last}"
        advice = "change the prompt, or ask the platform team, who finds the cause in the log of the rollout role"
        return EngineKilled(f"{text}; {advice}" if is_sure else text, is_sure=is_sure)

    def forget(self, uids: Set[str]) -> None:
        """Forget jobs that are gone."""
        self._found.forget(lambda key, _: key.partition(" ")[0] in uids)


def _key(uid: str, prompt_ids: NDArray[np.int32]) -> str:
    return f"{uid} {hashlib.sha256(prompt_ids.tobytes()).hexdigest()}"
