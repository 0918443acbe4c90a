"""The engine seam: a base model that generates with adapters, one immutable identity per adapter version.

`vllm_engine.VllmEngine` is the real one, `reference_engine.ReferenceEngine` ships as its deterministic fake (transformers, one
sequence at a time, so that a result depends on nothing but its request); both pass `tests/rollout/test_engine_contract.py`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from marlaas_api.errors import Permanent, Retryable
from marlaas_api.messages import StopReason


class EngineDown(Retryable):
    """The engine died, hangs or is restarting; nothing that was under way on it will end."""


class LoadFailed(Permanent):
    """The engine refused an adapter; the text is the engine's own."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine can hold. `dtype` is what it computes in; `max_model_len` counts prompt and output tokens."""

    slots: int
    max_rank: int
    max_model_len: int
    max_num_seqs: int
    dtype: str


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter version inside an engine: `name` is unique for ever, `slot_id` is this engine's number for it (from 1, never reused)."""

    name: str
    slot_id: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw: pure softmax sampling at `temperature`, seeded, until an end token or `max_tokens`."""

    temperature: float
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Completion:
    """output_ids, logprobs: [T], logprobs under softmax(logits / temperature). An end token, if drawn, is the last id and counted."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: StopReason
    cached_tokens: int = 0


class Engine(Protocol):
    """One engine. Every method raises EngineDown once the engine is gone; `restart` makes an empty one."""

    @property
    def limits(self) -> EngineLimits: ...
    async def start(self) -> None:
        """Load the base model. Raises Permanent with the engine's own words when it cannot (model missing, no memory)."""
        ...

    async def restart(self) -> None:
        """End what is left of the engine and start anew, without adapters."""
        ...

    async def stop(self) -> None: ...
    async def load(self, adapter: LoadedAdapter) -> None:
        """Bring an adapter into a slot before any request uses it. Raises LoadFailed; other tenants notice nothing."""
        ...

    async def unload(self, adapter: LoadedAdapter) -> None: ...
    async def digest(self, adapter: LoadedAdapter) -> str:
        """`marlaas_worker.adapters` digest of the tensors read back from the engine's own slot. Raises LoadFailed if it holds none."""
        ...

    async def score(self, adapter: LoadedAdapter, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Logprobs [T-1] of ids 1.. under the adapter, at temperature 1."""
        ...

    async def generate(
        self, request: str, adapter: LoadedAdapter, prompt_ids: npt.NDArray[np.int32], sampling: Sampling
    ) -> Completion:
        """Generate; cancelling the caller aborts the request within the engine. `request` is unique per call."""
        ...

    async def healthy(self) -> bool:
        """True if the engine answers at all, within a bound of its own."""
        ...
