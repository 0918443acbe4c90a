"""Holds a request's tokens in vLLM's core process until its end; only the first ones are sent at once.

vLLM sends a message after each step, with the new token of each request. To decode and distribute these tokens took a fifth of
the rollout role's time. The role needs only two outputs of a request: the first, which shows that it has begun, and the last.
"""

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np


class OutputBuffer:
    """Joins all `EngineCoreOutput`s that vLLM makes for a request, except the first, into one. Does not import vllm."""

    def __init__(self) -> None:
        self._held: dict[str, list[Any]] = {}

    def __len__(self) -> int:
        """Return the number of requests that have begun and not ended."""
        return len(self._held)

    def pass_on(self, outputs: Iterable[Any]) -> list[Any]:
        """Return the outputs to send now: the first output of each request, and all later outputs of a finished request, joined into one.

        outputs: the outputs of one step of the engine.
        """
        return [ready for output in outputs if (ready := self._next(output)) is not None]

    def forget(self, requests: Collection[str]) -> None:
        """Drop the held outputs of requests that end without a last output, such as aborted ones. requests: their ids."""
        for request in requests:
            self._held.pop(request, None)

    def _next(self, output: Any) -> Any:
        held = self._held.get(output.request_id)
        if output.finished:
            self._held.pop(output.request_id, None)
            return _joined([*held, output]) if held else output
        if held is None:
            self._held[output.request_id] = []
            return output
        held.append(output)
        return None


def _joined(outputs: list[Any]) -> Any:
    """Return the last output, changed to have the tokens and logprobs of all."""
    last = outputs[-1]
    last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
    found = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    if found:
        last.new_logprobs = type(found[0])(*(np.concatenate([one[part] for one in found]) for part in range(3)))
    return last
