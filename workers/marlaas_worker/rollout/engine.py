"""The engine interface: a base model that generates with LoRA adapters, each loaded under an immutable name.

`vllm_engine.VllmEngine` is used in production. `reference_engine.ReferenceEngine` is a deterministic
replacement: it runs transformers, one sequence at a time, so a result depends only on its request. Both pass
`tests/rollout/test_engine_contract.py`.
"""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from marlaas_api.errors import InvalidInput, Permanent, Retryable
from marlaas_api.messages import StopReason
from marlaas_worker.calibration import fingerprint
from marlaas_worker.rollout.engine_progress import EngineCounts
from marlaas_worker.rollout.replies import Stops

T = TypeVar("T")
Began = Callable[[], None]
"""Callback of a request, called once on the event loop when the engine has begun to generate: at the latest with the first token."""


def unheard() -> None:
    """Do nothing; the default `Began`."""


class EngineDown(Retryable):
    """The engine exited, hangs or is restarting; none of its pending calls will complete."""


class LoadFailed(Permanent):
    """The engine refused to load, unload or use an adapter; the text comes from the engine."""


class PromptInvalid(Permanent):
    """No engine can generate from these ids: none, too many, or outside the vocabulary."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of an engine.

    Attributes:
        slots: most adapters that it holds at once.
        max_rank: largest rank of an adapter.
        max_model_len: size of the context window: most prompt and output tokens together, the lower of the pool's and the model's limit.
        max_num_seqs: most requests that it runs at once.
        dtype: the dtype in which the engine computes.
        kv_tokens: tokens that fit into the KV cache; 0 until the engine has started, or if it does not report the number.
        step_tokens: most tokens, of prompts and outputs, that one step computes; 0 in the same cases.
    """

    slots: int
    max_rank: int
    max_model_len: int
    max_num_seqs: int
    dtype: str
    kv_tokens: int = 0
    step_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter version inside an engine.

    Attributes:
        name: the version's engine name, the same for ever.
        slot_id: this engine's number for this load, from 1; never reused.
        folder: the local folder of its files.
    """

    name: str
    slot_id: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters: seeded softmax sampling at `temperature`, or at 0 the most probable token, until an end token or `max_tokens`.

    Attributes:
        max_s: seconds after the first token at which the generation ends with the tokens sampled so far.
        stops: stop strings, which also end the generation; None for none.
        end_ids: end tokens in addition to the model's.
    """

    temperature: float
    max_tokens: int
    seed: int
    max_s: float = math.inf
    stops: Stops | None = None
    end_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Completion:
    """A generation's result.

    Attributes:
        output_ids: [T] generated ids; an end token, if sampled, is the last one.
        logprobs: [T] of `output_ids` under softmax(logits / temperature); under softmax(logits) at temperature 0.
        stop_reason: why the generation ended (`engine.stop_reason`).
        cached_tokens: prompt tokens whose keys and values came from the prefix cache.
        is_overtime: whether `Sampling.max_s` ended it; its stop reason is LENGTH, and its tokens are those that were sampled first.
    """

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: StopReason
    cached_tokens: int = 0
    is_overtime: bool = False


class Engine(Protocol):
    """One engine with one base model.

    After the engine goes down, every method raises EngineDown until `restart`, which starts it without
    adapters.

    Attributes:
        base: `calibration.fingerprint` of its base model.
        limits: adapters, requests and tokens that it can hold.
        counts: counts of its work, over all incarnations.
    """

    @property
    def base(self) -> str: ...
    @property
    def limits(self) -> EngineLimits: ...
    @property
    def counts(self) -> EngineCounts: ...
    async def start(self) -> None:
        """Load the base model. Raises Permanent with the engine's error text (model missing, out of memory)."""
        ...

    async def restart(self) -> None:
        """Stop the engine, if it still runs, and start it again without adapters."""
        ...

    async def stop(self) -> None: ...
    async def load(self, adapter: LoadedAdapter) -> str:
        """Load an adapter into a slot, and return the slot's `digest`. The adapter's folder must exist until the adapter is unloaded.

        Load and digest are one call, because an engine that runs a batch answers calls only between two steps. Other adapters stay.

        Raises LoadFailed if the engine refuses the adapter, every slot is taken, the name is loaded, or `slot_id` was
        used before.
        """
        ...

    async def unload(self, adapter: LoadedAdapter) -> None:
        """Free the adapter's slot; does nothing if it holds none. Raises LoadFailed while a request uses it."""
        ...

    async def digest(self, adapter: LoadedAdapter) -> str:
        """Return the `marlaas_worker.adapters` digest of the tensors read back from the engine's slot.

        Raises LoadFailed if the adapter has no slot.
        """
        ...

    async def score(self, adapter: LoadedAdapter, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Return the logprobs [T-1] of ids[1:] under the adapter, at temperature 1. ids: [T], where T is 2 to max_model_len - 1."""
        ...

    async def generate(
        self,
        request: str,
        adapter: LoadedAdapter,
        prompt_ids: npt.NDArray[np.int32],
        sampling: Sampling,
        began: Began = unheard,
    ) -> Completion:
        """Generate a reply to a prompt. Cancelling the caller aborts the request; `sampling.max_s` ends it with its tokens so far.

        A prompt that fills the context window returns an empty Completion with CONTEXT.

        Args:
            request: name of the request, unique for each call.
            began: called once, when the engine has begun to generate, at the latest with the first token.

        Raises:
            PromptInvalid: the ids are not valid.
            LoadFailed: the adapter is not loaded; the engine never serves the base model without an adapter.
        """
        ...

    async def healthy(self) -> bool:
        """Return whether the engine answers within its own time limit.

        After False the engine counts as down: pending calls raise EngineDown, and only `restart` helps.
        """
        ...


@dataclass(slots=True)
class Residents:
    """An engine's own record of its loaded adapters and of the requests that use them.

    A wrong call raises LoadFailed, so that an error in the caller's own record (`slots.ProvenVersions`) cannot reach the engine.

    num_slots: most adapters that may be loaded at once.
    """

    num_slots: int
    _held: dict[int, LoadedAdapter] = field(default_factory=dict)
    _running: dict[int, int] = field(default_factory=dict)
    _past: bytearray = field(default_factory=bytearray)  # a bit per number: used before

    def admit(self, adapter: LoadedAdapter) -> None:
        """Record an adapter before its load.

        Raises LoadFailed if all slots are taken, the name is loaded, or `slot_id` was used before.
        """
        if len(self._held) >= self.num_slots:
            raise LoadFailed(f"all {self.num_slots} adapter slots are taken")
        if any(held.name == adapter.name for held in self._held.values()):
            raise LoadFailed(f"{adapter.name} is loaded already")
        byte, bit = divmod(adapter.slot_id, 8)
        if adapter.slot_id < 1 or (byte < len(self._past) and self._past[byte] >> bit & 1):
            raise LoadFailed(f"{adapter.name}: slot number {adapter.slot_id} was used before")
        self._past.extend(bytes(max(0, byte + 1 - len(self._past))))
        self._past[byte] |= 1 << bit
        self._held[adapter.slot_id] = adapter

    def remove(self, adapter: LoadedAdapter) -> bool:
        """Remove an adapter; return False if it was not loaded. Raises LoadFailed while requests use it."""
        if self._running.get(adapter.slot_id):
            raise LoadFailed(f"{adapter.name} still runs {self._running[adapter.slot_id]} requests")
        held = self._held.get(adapter.slot_id) == adapter
        if held:
            del self._held[adapter.slot_id]
            self._running.pop(adapter.slot_id, None)
        return held

    def require(self, adapter: LoadedAdapter) -> None:
        """Raise LoadFailed unless exactly this adapter is loaded."""
        if self._held.get(adapter.slot_id) != adapter:
            raise LoadFailed(f"{adapter.name} is not loaded in this engine")

    @contextmanager
    def using(self, adapter: LoadedAdapter) -> Iterator[None]:
        """Prevent an adapter's removal while the context is open. Raises LoadFailed unless it is loaded."""
        self.require(adapter)
        self._running[adapter.slot_id] = self._running.get(adapter.slot_id, 0) + 1
        try:
            yield
        finally:
            if adapter.slot_id in self._running:
                self._running[adapter.slot_id] -= 1

    def clear(self) -> None:
        """Remove all adapters, after the engine has stopped."""
        self._held.clear()
        self._running.clear()


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Facts about the model in a Hugging Face folder.

    folder: that folder. fingerprint: `calibration.fingerprint`. max_positions: `max_position_embeddings` of `config.json`, in tokens.
    """

    folder: Path
    fingerprint: str
    vocab_size: int
    max_positions: int


def read_base_model(folder: Path) -> ModelFolder:
    """Read `config.json` and fingerprint the weights. Raises InvalidInput that names the missing part."""
    try:
        fields: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidInput(f"no base model in {folder}: {error}; see `marlaas models list`") from error
    text = {**fields, **fields.get("text_config", {})}
    try:
        base = fingerprint(folder)
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidInput(
            f"the weights in {folder} are not safetensors files: {error!r}; fetch the model again"
        ) from error
    try:
        return ModelFolder(folder, base, int(text["vocab_size"]), int(text["max_position_embeddings"]))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"{folder / 'config.json'} does not describe a causal language model: {error!r}") from error


def check_ids(ids: npt.NDArray[np.int32], vocab_size: int) -> None:
    """Raise PromptInvalid if there are no ids, or some outside the vocabulary, which would crash an engine for every tenant."""
    if ids.ndim != 1 or len(ids) == 0:
        raise PromptInvalid("an empty prompt")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise PromptInvalid(f"token ids from {ids.min()} to {ids.max()}, but the model knows 0 to {vocab_size - 1}")


def stop_reason(ended: bool, num_output: int, sampling: Sampling, *, matched: bool = False) -> StopReason:
    """Return why a generation ended.

    The first that applies: STOP if `ended`, MATCH if `matched`, LENGTH if `sampling.max_tokens` were generated, else CONTEXT: the context
    window is full.

    Args:
        ended: whether the last token is an end token.
        num_output: number of generated tokens.
        matched: whether the last token completes a stop string.
    """
    if ended or matched:
        return StopReason.STOP if ended else StopReason.MATCH
    return StopReason.LENGTH if num_output >= sampling.max_tokens else StopReason.CONTEXT


async def unless_down(work: Awaitable[T], down: "asyncio.Future[str]") -> T:
    """Await a call of an engine, and return its result. Raises EngineDown if the engine goes down first.

    On cancellation, waits until the cancelled call has ended, unless the engine is down.

    down: set when the engine goes down, with the reason, which becomes the error's text.
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
