"""How often the engine failed while it ran a prompt, so that one job's requests stop it for all tenants a few times only."""

import hashlib

import numpy as np
from numpy.typing import NDArray

from marlaas_worker.rollout.bounded_cache import BoundedCache

MAX_ENGINE_FAILURES = 3
_MAX_BYTES = 1 << 20
_ENTRY_BYTES = 256


class EngineFailures:
    """Failures by job and prompt. Members of a group have the same prompt, and so has another attempt at an episode.

    All requests with a prompt that run when the engine fails count once together. A prompt that is generated is innocent, and
    its failures are forgotten.
    """

    def __init__(self) -> None:
        self._failures = BoundedCache[int](_MAX_BYTES)

    def of(self, uid: str, prompt_ids: NDArray[np.int32]) -> int:
        """Return how often the engine failed with a job's prompt."""
        return (self._failures.get(_key(uid, prompt_ids)) or 0) if len(self._failures) else 0

    def note(self, uid: str, prompt_ids: NDArray[np.int32], before: int) -> int:
        """Note a failure, and return the number of all. before: their number when the request was given to the engine."""
        key = _key(uid, prompt_ids)
        number = max(before + 1, self._failures.get(key) or 0)
        self._failures.put(key, number, _ENTRY_BYTES)
        return number

    def forget(self, uid: str, prompt_ids: NDArray[np.int32]) -> None:
        """Note that a prompt was generated."""
        if len(self._failures):
            self._failures.drop(_key(uid, prompt_ids))


def _key(uid: str, prompt_ids: NDArray[np.int32]) -> str:
    return f"{uid} {hashlib.sha256(prompt_ids.tobytes()).hexdigest()}"
