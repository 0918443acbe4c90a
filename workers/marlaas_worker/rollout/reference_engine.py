"""Deterministic engine in place of vLLM: transformers, one sequence at a time on one thread.

A result depends only on its request: not on other requests, order, slots or restarts. Exactness tests need
that; it is slow. It has the same limits and raises the same errors as `VllmEngine`.
"""

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import linear

from marlaas_api.messages import StopReason
from marlaas_api.messages.pool_spec import PoolSpec
from marlaas_worker.adapters import DTYPES, AdapterInvalid, Kind, as_held, choose_dtype, read_adapter, slot_digest
from marlaas_worker.base_model import load_base_model
from marlaas_worker.rollout.engine import (
    Began,
    Completion,
    EngineDown,
    EngineLimits,
    LoadedAdapter,
    LoadFailed,
    PromptInvalid,
    Residents,
    Sampling,
    check_ids,
    read_base_model,
    stop_reason,
    unheard,
    unless_down,
)
from marlaas_worker.rollout.engine_progress import EngineCounts

T = TypeVar("T")
Matrices = dict[str, dict[Kind, torch.Tensor]]


class ReferenceEngine:
    """Implements `engine.Engine` with transformers, one sequence at a time on one thread. Raises InvalidInput if the folder contains no model.

    Args:
        model: folder of the base model.
        spec: the pool's settings, such as the number of slots and the context length.
        end_ids: the model's end tokens; each ends a generation.
    """

    def __init__(self, model: Path, spec: PoolSpec, end_ids: frozenset[int]) -> None:
        self._base = read_base_model(model)
        self._end_ids = end_ids
        max_model_len = min(spec.rollout.max_model_len, self._base.max_positions)
        self._limits = EngineLimits(
            slots=spec.adapter_slots,
            max_rank=spec.max_rank,
            max_model_len=max_model_len,
            max_num_seqs=spec.rollout.max_num_seqs,
            dtype=choose_dtype(spec.rollout.dtype, gpu=False),
            kv_tokens=spec.rollout.max_num_seqs * max_model_len,
        )
        self._residents = Residents(spec.adapter_slots)
        self._held: dict[int, Matrices] = {}
        self._incarnation: _Incarnation | None = None

    @property
    def base(self) -> str:
        return self._base.fingerprint

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    @property
    def counts(self) -> EngineCounts:
        return EngineCounts()  # It has no batches and no queue of its own.

    async def start(self) -> None:
        if self._incarnation is None:
            thread = ThreadPoolExecutor(1, "reference-engine", partial(torch.set_num_threads, 1))
            loop = asyncio.get_running_loop()
            model = await loop.run_in_executor(thread, _AdaptedModel, self._base.folder, DTYPES[self._limits.dtype])
            self._incarnation = _Incarnation(thread, loop.create_future(), model)

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def stop(self) -> None:
        self.crash("the engine was stopped")
        if self._incarnation is not None:
            self._incarnation.thread.shutdown(wait=False)
        self._incarnation = None
        self._residents.clear()
        self._held.clear()

    def crash(self, reason: str) -> None:
        """Simulate a crash: all pending calls, and all later ones until `restart`, raise EngineDown with the reason."""
        if self._incarnation is not None and not self._incarnation.down.done():
            self._incarnation.down.set_result(reason)

    async def load(self, adapter: LoadedAdapter) -> str:
        incarnation = self._alive()
        self._residents.admit(adapter)
        try:
            self._held[adapter.slot_id] = await incarnation.work(partial(self._read, incarnation.model, adapter))
        except (AdapterInvalid, LoadFailed) as error:
            self._residents.remove(adapter)
            raise LoadFailed(f"{adapter.name}: {error}") from error
        return await self.digest(adapter)

    async def unload(self, adapter: LoadedAdapter) -> None:
        self._alive()
        if self._residents.remove(adapter):
            self._held.pop(adapter.slot_id, None)

    async def digest(self, adapter: LoadedAdapter) -> str:
        held = self._matrices(adapter)
        return slot_digest((module, kind, matrix) for module, pair in held.items() for kind, matrix in pair.items())

    async def score(self, adapter: LoadedAdapter, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        incarnation, held = self._alive(), self._matrices(adapter)
        check_ids(ids, self._base.vocab_size)
        if not 2 <= len(ids) < self._limits.max_model_len:
            raise PromptInvalid(f"{len(ids)} ids to score; 2 to {self._limits.max_model_len - 1} are possible")
        with self._residents.using(adapter):
            return await incarnation.work(partial(incarnation.model.score, held, ids))

    async def generate(
        self,
        request: str,
        adapter: LoadedAdapter,
        prompt_ids: npt.NDArray[np.int32],
        sampling: Sampling,
        began: Began = unheard,
    ) -> Completion:
        incarnation, held = self._alive(), self._matrices(adapter)
        check_ids(prompt_ids, self._base.vocab_size)
        room = min(sampling.max_tokens, self._limits.max_model_len - len(prompt_ids))
        if room < 1:
            return Completion((), (), StopReason.CONTEXT)
        over, overtime, loop = threading.Event(), threading.Event(), asyncio.get_running_loop()

        def begin() -> None:
            began()
            if sampling.max_s < math.inf:
                loop.call_later(sampling.max_s, overtime.set)

        draw = _Draw(
            prompt_ids,
            sampling,
            room,
            self._end_ids | sampling.end_ids,
            partial(loop.call_soon_threadsafe, begin),
            over,
            overtime,
        )
        try:
            with self._residents.using(adapter):
                return await incarnation.work(partial(incarnation.model.generate, held, draw))
        finally:
            over.set()

    async def healthy(self) -> bool:
        return self._incarnation is not None and not self._incarnation.down.done()

    def _alive(self) -> "_Incarnation":
        if self._incarnation is None:
            raise EngineDown("the engine is not running")
        if self._incarnation.down.done():
            raise EngineDown(self._incarnation.down.result())
        return self._incarnation

    def _matrices(self, adapter: LoadedAdapter) -> Matrices:
        self._alive()
        self._residents.require(adapter)
        return self._held[adapter.slot_id]

    def _read(self, model: "_AdaptedModel", adapter: LoadedAdapter) -> Matrices:
        tensors, config = read_adapter(adapter.folder)
        if config.rank > self._limits.max_rank:
            raise LoadFailed(f"rank {config.rank} is above the engine's {self._limits.max_rank}")
        held: Matrices = {}
        for module, kind, matrix in as_held(tensors, config.scaling, self._limits.dtype):
            held.setdefault(module, {})[kind] = matrix
        model.check(held)
        return held


@dataclass(frozen=True, slots=True)
class _Incarnation:
    """One run of the engine: its thread, its model, and `down`, which is set to the reason when the run has ended."""

    thread: ThreadPoolExecutor
    down: "asyncio.Future[str]"
    model: "_AdaptedModel"

    async def work(self, work: Callable[[], T]) -> T:
        """Run a function on the engine's thread, in the order of calls. Raises EngineDown if the engine goes down first."""
        return await unless_down(asyncio.get_running_loop().run_in_executor(self.thread, work), self.down)


@dataclass(frozen=True, slots=True)
class _Draw:
    """Inputs of one generation on the engine's thread.

    Attributes:
        prompt_ids: the prompt, int32 [T].
        sampling: temperature, seed and stop strings; for limit and end tokens, `room` and `end_ids` count.
        room: most tokens to generate: the limit of `sampling`, or the rest of the context window if that is less.
        end_ids: tokens that end the generation: the model's and those of `sampling`.
        begin: called when the thread starts the generation.
        over: set when the result is no longer awaited.
        overtime: set at the generation's time limit.
    """

    prompt_ids: npt.NDArray[np.int32]
    sampling: Sampling
    room: int
    end_ids: frozenset[int]
    begin: Callable[[], object]
    over: threading.Event
    overtime: threading.Event

    def may_continue(self, ids: Sequence[int]) -> bool:
        """Return whether to sample another token after `ids`, the tokens sampled so far.

        False if the result is no longer awaited, or after `room` tokens, an end token, a stop string, or the time limit (but not before the
        first token).
        """
        if self.over.is_set() or len(ids) >= self.room:
            return False
        return not ids or not (self.overtime.is_set() or ids[-1] in self.end_ids or self.is_matched(ids))

    def is_matched(self, ids: Sequence[int]) -> bool:
        """Return whether the last of these tokens completes a string of `Sampling.stops`."""
        stops = self.sampling.stops
        return stops is not None and stops.end(ids, len(ids) - 1) is not None


class _AdaptedModel:
    """A base model whose linear layers, except the head, add the outputs of the active adapter. Used by one thread only."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._model = load_base_model(folder, dtype)
        modules = self._model.named_modules()
        linears = {name: module for name, module in modules if isinstance(module, torch.nn.Linear)}
        self._linears = {name: linear for name, linear in linears.items() if not name.endswith("head")}
        self._active: Matrices = {}
        for name, layer in self._linears.items():
            # A hook would take torch's slow path, which costs a sixth of a token's time.
            layer.forward = partial(self._adapted, name, layer.forward)  # type: ignore[method-assign]

    def check(self, held: Matrices) -> None:
        """Raise LoadFailed unless each module of an adapter is a linear layer of this model, and its matrices fit the layer.

        held: the adapter's A and B, by module.
        """
        for module, pair in held.items():
            linear = self._linears.get(module)
            if linear is None:
                raise LoadFailed(f"the base model has no linear layer {module!r} (the output head cannot be adapted)")
            if (pair["B"].shape[0], pair["A"].shape[1]) != (linear.out_features, linear.in_features):
                raise LoadFailed(f"{module!r} is {linear.out_features} by {linear.in_features}, the adapter's is not")

    @torch.inference_mode()
    def score(self, held: Matrices, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        self._active = held
        tokens = torch.from_numpy(ids.astype(np.int64))
        logprobs = torch.log_softmax(self._model(input_ids=tokens[None]).logits[0, :-1].float(), dim=-1)
        return np.asarray(logprobs.gather(1, tokens[1:, None])[:, 0].numpy(), dtype=np.float32)

    @torch.inference_mode()
    def generate(self, held: Matrices, draw: _Draw) -> Completion:
        self._active = held
        if not draw.over.is_set():
            draw.begin()
        generator = torch.Generator().manual_seed(draw.sampling.seed)
        ids: list[int] = []
        logprobs: list[float] = []
        step, cache = torch.from_numpy(draw.prompt_ids.astype(np.int64))[None], None
        while draw.may_continue(ids):
            output = self._model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            row = torch.log_softmax(output.logits[0, -1].float() / (draw.sampling.temperature or 1.0), dim=-1)
            chosen = torch.multinomial(row.exp(), 1, generator=generator) if draw.sampling.temperature else row.argmax()
            step = chosen.view(1, 1)
            ids.append(int(step))
            logprobs.append(float(row[ids[-1]]))
        has_ended = ids[-1:] != [] and ids[-1] in draw.end_ids
        matched = bool(ids) and draw.is_matched(ids)
        is_overtime = not (has_ended or matched) and len(ids) < draw.room and draw.overtime.is_set()
        reason = stop_reason(has_ended, len(ids), draw.sampling, matched=matched)
        reason = StopReason.LENGTH if is_overtime else reason
        return Completion(tuple(ids), tuple(logprobs), reason, is_overtime=is_overtime)

    def _adapted(self, name: str, base: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        pair = self._active.get(name)
        if pair is None:
            return base(hidden)
        return base(hidden) + linear(linear(hidden, pair["A"]), pair["B"])
