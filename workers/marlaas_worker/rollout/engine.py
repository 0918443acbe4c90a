"""The engine seam: a base model that generates with adapters, one immutable identity per adapter version.

`vllm_engine.VllmEngine` is the real one, `reference_engine.ReferenceEngine` ships as its deterministic fake (transformers, one
sequence at a time, so that a result depends on nothing but its request); both pass `tests/rollout/test_engine_contract.py`.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from marlaas_api.errors import Permanent, Retryable
from marlaas_api.messages import StopReason
from marlaas_worker.calibration import fingerprint

T = TypeVar("T")
Began = Callable[[], None]
"""Called once, on the event loop, when an engine no longer keeps a request in a queue of its own."""


def unheard() -> None:
    """A `Began` for callers that do not ask when a generation begins."""


class EngineDown(Retryable):
    """The engine died, hangs or is restarting; nothing that was under way on it will end."""


class LoadFailed(Permanent):
    """The engine refused an adapter; the text is the engine's own."""


class PromptInvalid(Permanent):
    """No engine could generate from these ids: there are none, too many, or some that the model does not know."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine can hold. `dtype` is what it computes in; `max_model_len` counts prompt and output tokens, and is
    the pool's or the model's own, whichever is less.
    """

    slots: int
    max_rank: int
    max_model_len: int
    max_num_seqs: int
    dtype: str


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter version inside an engine: `name` is the version's for ever, `slot_id` is this engine's number for this stay (from 1, never reused)."""

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
    """One engine. Every method raises EngineDown once the engine is gone; `restart` makes an empty one.

    base: `calibration.fingerprint` of its base model.
    """

    @property
    def base(self) -> str: ...
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
        """Bring an adapter into a slot before any request uses it; its folder must stay until it is unloaded.

        Raises LoadFailed (also when every slot is taken, the name is loaded or the number was used before); other tenants notice nothing.
        """
        ...

    async def unload(self, adapter: LoadedAdapter) -> None:
        """Free its slot; nothing happens if it holds none. Raises LoadFailed while a request uses it."""
        ...

    async def digest(self, adapter: LoadedAdapter) -> str:
        """`marlaas_worker.adapters` digest of the tensors read back from the engine's own slot. Raises LoadFailed if it holds none."""
        ...

    async def score(self, adapter: LoadedAdapter, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Logprobs [T-1] of ids 1.. under the adapter, at temperature 1; T from 2 to max_model_len - 1."""
        ...

    async def generate(
        self,
        request: str,
        adapter: LoadedAdapter,
        prompt_ids: npt.NDArray[np.int32],
        sampling: Sampling,
        began: Began = unheard,
    ) -> Completion:
        """Generate; cancelling the caller aborts the request within the engine. `request` is unique per call. Calls `began` no later than
        with the first token.

        A prompt that fills the context window gives an empty Completion with CONTEXT. Raises PromptInvalid, and LoadFailed
        if the adapter is not loaded (the base is never served bare).
        """
        ...

    async def healthy(self) -> bool:
        """True if the engine answers at all, within a bound of its own.

        After False the engine counts as gone: everything pending raises EngineDown, and only `restart` helps.
        """
        ...


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What an engine needs to know of the model in a Hugging Face folder. fingerprint: `calibration.fingerprint`."""

    folder: Path
    fingerprint: str
    vocab_size: int
    max_positions: int


def read_base_model(folder: Path) -> ModelFolder:
    """Read `config.json`. Raises Permanent with what is missing."""
    try:
        fields: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise Permanent(f"no base model in {folder}: {error}; see `marlaas models list`") from error
    text = {**fields, **fields.get("text_config", {})}
    try:
        base = fingerprint(folder)
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise Permanent(
            f"the weights in {folder} are not safetensors files: {error!r}; fetch the model again"
        ) from error
    try:
        return ModelFolder(folder, base, int(text["vocab_size"]), int(text["max_position_embeddings"]))
    except (KeyError, TypeError, ValueError) as error:
        raise Permanent(f"{folder / 'config.json'} does not describe a causal language model: {error!r}") from error


def check_ids(ids: npt.NDArray[np.int32], vocab_size: int) -> None:
    """Raise PromptInvalid for ids that would bring an engine down, for every tenant."""
    if ids.ndim != 1 or len(ids) == 0:
        raise PromptInvalid("an empty prompt")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise PromptInvalid(f"token ids from {ids.min()} to {ids.max()}, but the model knows 0 to {vocab_size - 1}")


def stop_reason(ended: bool, num_output: int, sampling: Sampling) -> StopReason:
    """Why a generation is over; `ended` if its last token was an end token."""
    if ended:
        return StopReason.STOP
    return StopReason.LENGTH if num_output >= sampling.max_tokens else StopReason.CONTEXT


async def unless_down(work: Awaitable[T], down: "asyncio.Future[str]") -> T:
    """Await an engine's answer; raise EngineDown with `down`'s reason if that comes first, for then no answer will.

    Cancelling waits until the engine was told.
    """
    task = asyncio.ensure_future(work)
    pending: set[asyncio.Future[Any]] = {task, down}
    try:
        await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise EngineDown(down.result())
    finally:
        if not task.done():
            task.cancel()
            if not down.done():
                await asyncio.wait({task})
