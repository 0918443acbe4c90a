"""Counts the failures of the engine by prompt. A prompt that has ended the engine three times is refused. Does not import vLLM."""

import hashlib
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from marlaas_api.errors import Permanent
from marlaas_worker.rollout.served_jobs import Failures, ServedJob

MAX_ENGINE_FAILURES = 3
_ENTRY_BYTES = 1024


class EngineKilled(Permanent):
    """The engine failed each time that it ran a prompt. Another try would end it for all tenants again.

    is_sure: whether the engine has generated for other requests since the first failure, so that the prompt must be the cause.
    """

    def __init__(self, text: str, *, is_sure: bool) -> None:
        super().__init__(text)
        self.is_sure = is_sure


@dataclass(slots=True)
class EngineFailures:
    """Counts the failures of this replica's engine by job and prompt (`ServedJob.failures`).

    By prompt, because the members of a group have the same one, and so has another attempt at an episode. If several requests with a
    prompt run when the engine fails, that counts as one failure. The failures with a prompt are forgotten once the engine has generated
    a reply to it. A request also counts its own failures, because the tokens that were sampled for it may be the cause.
    """

    _num_generated: int = 0

    def of(self, job: ServedJob, prompt_ids: NDArray[np.int32], own: Failures) -> Failures:
        """Return the failures of the engine with a job's prompt, or those of one request, if they are more. own: of the request alone."""
        shared = job.failures.get(_key(prompt_ids)) if len(job.failures) else None
        return own if shared is None or shared.number < own.number else shared

    def note(
        self, job: ServedJob, prompt_ids: NDArray[np.int32], known: Failures, own: Failures, text: str
    ) -> Failures:
        """Record a failure of the engine while it ran a request, and return the request's own failures.

        known: the result of `of` when the request was given to the engine. own: the request's own before this one. text: the error.
        """
        key = _key(prompt_ids)
        shared = self._more(known, text)
        found = job.failures.get(key)
        if found is None or found.number < shared.number:
            job.failures.put(key, shared, _ENTRY_BYTES)
        return self._more(own, text)

    def _more(self, before: Failures, text: str) -> Failures:
        return Failures(before.number + 1, before.since if before.number else self._num_generated, text)

    def generated(self, job: ServedJob, prompt_ids: NDArray[np.int32]) -> None:
        """Record that the engine has generated a reply to a prompt, and forget the failures with this prompt."""
        self._num_generated += 1
        if len(job.failures):
            job.failures.drop(_key(prompt_ids))

    def verdict(self, job: ServedJob, prompt_ids: NDArray[np.int32], found: Failures, turn: str) -> EngineKilled:
        """Return the error of a request whose prompt is not run again.

        If the engine has generated nothing else since the first failure, the failures may have another cause than the prompt. The next
        request with the prompt, such as that of another attempt at the episode, is then run once, alone in the engine.

        found: the failures with the prompt, from `of`. turn: name of the request's turn, for the error's text.
        """
        is_sure = self._num_generated > found.since
        if not is_sure:
            once = replace(found, number=MAX_ENGINE_FAILURES - 1)
            job.failures.put(_key(prompt_ids), once, _ENTRY_BYTES)
        text = f"the engine failed {found.number} times while it ran the prompt of turn {turn}; last: {found.last}"
        advice = "change the prompt, or ask the platform team, who finds the cause in the log of the rollout role"
        return EngineKilled(f"{text}; {advice}" if is_sure else text, is_sure=is_sure)


def _key(prompt_ids: NDArray[np.int32]) -> bytes:
    return hashlib.sha256(prompt_ids.tobytes()).digest()
