"""Production engine: vLLM's `AsyncLLM`, with token ids as input, and token ids and logprobs as output.

Only this package's vLLM modules import vllm, and only when an engine starts. vLLM runs in child processes of this one;
`vllm_incarnation.EngineIncarnation` is one run of them. Uses no tokenizer, job or bus.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from marlaas_api.errors import MarlaasError, Retryable
from marlaas_api.messages import StopReason
from marlaas_api.messages.pool_spec import PoolSpec
from marlaas_worker.adapters import AdapterInvalid, read_config
from marlaas_worker.devices import OutOfMemory, says_lost, says_no_memory, uses_gpu
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
)
from marlaas_worker.rollout.engine_progress import STALL_S, EngineCounts
from marlaas_worker.rollout.replies import Stops
from marlaas_worker.rollout.vllm_incarnation import EngineIncarnation, fork_obstacle, start_incarnation
from marlaas_worker.rollout.vllm_settings import vllm_settings

log = logging.getLogger(__name__)

ANSWER_BOUND_S = 30.0
_ABORTED = "abort"
_LAST_AT_ONCE = 1 << 30
"""`stream_interval`, in tokens: vLLM sends a request's first token at once, and all others together with the last one."""


class VllmEngine:
    """Implements `engine.Engine` with vLLM. Raises InvalidInput if the folder contains no model, or as `vllm_settings`.

    Args:
        model: folder of the base model.
        spec: the pool's.
        end_ids: tokens that end a generation.
        scratch: folder for vLLM's log and other files of the engine.
        may_fork: whether the first core process may be forked from this one. On a GPU, it is forked only if `vllm_incarnation.fork_obstacle` finds none.
        answer_bound_s: seconds without an answer and without computing after which the engine counts as hung.
    """

    def __init__(  # noqa: PLR0913 (the last two are keyword-only)
        self,
        model: Path,
        spec: PoolSpec,
        end_ids: frozenset[int],
        scratch: Path,
        *,
        answer_bound_s: float = ANSWER_BOUND_S,
        may_fork: bool = False,
    ) -> None:
        self._settings = vllm_settings(read_base_model(model), spec, scratch)
        self._end_ids = end_ids
        self._answer_bound_s = answer_bound_s
        self._residents = Residents(self._settings.limits.slots)
        self._incarnation: EngineIncarnation | None = None
        self._may_fork = may_fork
        self._past = EngineCounts()
        self._scores = count()

    @property
    def base(self) -> str:
        return self._settings.model.fingerprint

    @property
    def limits(self) -> EngineLimits:
        limits, one = self._settings.limits, self._incarnation
        return limits if one is None else replace(limits, kv_tokens=one.kv_tokens, step_tokens=one.step_tokens)

    @property
    def counts(self) -> EngineCounts:
        return self._incarnation.counts.after(self._past) if self._incarnation else self._past

    @property
    def processes(self) -> tuple[psutil.Process, ...]:
        """vLLM's processes, the core first; empty while the engine is not running."""
        return self._incarnation.processes if self._incarnation else ()

    async def start(self) -> None:
        if self._incarnation is None:
            why_not = fork_obstacle() if self._may_fork and uses_gpu() else ""
            if why_not:
                log.info("the engine imports vllm once more, which takes longer than to fork it: %s", why_not)
            forks, self._may_fork = self._may_fork and not why_not, False
            self._incarnation = await start_incarnation(self._settings, forks)

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def stop(self) -> None:
        incarnation, self._incarnation = self._incarnation, None
        self._residents.clear()
        if incarnation is not None:
            await incarnation.end()
            self._past = replace(incarnation.counts.after(self._past), queued=0)

    async def load(self, adapter: LoadedAdapter) -> str:
        incarnation = self._alive()
        self._residents.admit(adapter)
        try:
            arguments = (adapter.name, adapter.slot_id, str(adapter.folder), _rank(adapter))
            answers = await incarnation.call(incarnation.llm.collective_rpc("marlaas_load", args=arguments))
        except Exception as error:  # After a cancellation, the adapter may be loaded or not: the caller unloads it.
            self._residents.remove(adapter)
            raise refusal(adapter, error) from error
        return str(answers[0])

    async def unload(self, adapter: LoadedAdapter) -> None:
        incarnation = self._alive()
        if self._residents.remove(adapter):
            try:
                await incarnation.call(incarnation.llm.remove_lora(adapter.slot_id))
            except Exception as error:  # Only a restart brings its slots back to the expected state.
                incarnation.declare_down(f"vLLM cannot unload {adapter.name}: {error}")
                raise EngineDown(incarnation.down.result()) from error

    async def digest(self, adapter: LoadedAdapter) -> str:
        incarnation = self._alive()
        self._residents.require(adapter)
        try:
            arguments = (adapter.slot_id, _rank(adapter))
            answers = await incarnation.call(incarnation.llm.collective_rpc("marlaas_slot_digest", args=arguments))
        except Exception as error:
            raise refusal(adapter, error) from error
        return str(answers[0])

    async def score(self, adapter: LoadedAdapter, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        check_ids(ids, self._settings.model.vocab_size)
        if not 2 <= len(ids) < self.limits.max_model_len:
            raise PromptInvalid(f"{len(ids)} ids to score; 2 to {self.limits.max_model_len - 1} are possible")
        with self._residents.using(adapter):
            request = f"score-{next(self._scores)}-{adapter.name}"
            outputs = await self._run(request, adapter, ids, _scoring(), _Start())
        scores = np.asarray(outputs[-1].prompt_logprobs.logprobs, dtype=np.float32)
        if len(scores) != len(ids) - 1:
            raise Retryable(f"vLLM returned {len(scores)} logprobs for {len(ids)} ids of {request}")
        return scores

    async def generate(
        self,
        request: str,
        adapter: LoadedAdapter,
        prompt_ids: npt.NDArray[np.int32],
        sampling: Sampling,
        began: Began = unheard,
    ) -> Completion:
        check_ids(prompt_ids, self._settings.model.vocab_size)
        room = min(sampling.max_tokens, self.limits.max_model_len - len(prompt_ids))
        with self._residents.using(adapter):
            if room < 1:
                return Completion((), (), StopReason.CONTEXT)
            params = _sampling(sampling, room, self._end_ids | sampling.end_ids)
            start = _Start(began, sampling.max_s, sampling.stops)
            outputs = await self._run(request, adapter, prompt_ids, params, start)
        return _completion(outputs, sampling)

    async def healthy(self) -> bool:
        """Return whether the engine works, judged by its answers and its progress (`engine.Engine.healthy`, `engine_progress`).

        vLLM answers between two steps, and one step may be a long prompt on a CPU. So an engine that does not answer is healthy while
        it makes progress, or computes within the bound for one step. An engine that answers has ended its last step: it is healthy unless
        it has calls but has made no progress for STALL_S.
        """
        incarnation = self._incarnation
        if incarnation is None or incarnation.down.done():
            return False
        incarnation.standstill(incarnation.num_calls > 0)
        asked_at = _clock()
        try:
            async with asyncio.timeout(self._answer_bound_s):
                await incarnation.call(incarnation.llm.list_loras())
        except TimeoutError:
            _judge_silent(incarnation, _clock() - asked_at)
        except Exception as error:
            incarnation.declare_down(f"vLLM answered with an error: {error}")
        else:
            still_s = incarnation.standstill(incarnation.num_calls > 0).still_s
            if still_s >= STALL_S:
                incarnation.declare_down(
                    f"vLLM answers, but has made no progress with {incarnation.num_calls} calls for {still_s:.0f} s"
                )
        return not incarnation.down.done()

    def _alive(self) -> EngineIncarnation:
        if self._incarnation is None:
            raise EngineDown("the engine is not running")
        if self._incarnation.down.done():
            raise EngineDown(self._incarnation.down.result())
        return self._incarnation

    async def _run(
        self, request: str, adapter: LoadedAdapter, ids: npt.NDArray[np.int32], params: Any, start: "_Start"
    ) -> list[Any]:
        """Run a request, and return vLLM's outputs (RequestOutput) in order; the last one has the finish reason.

        Args:
            request: the request's id in vLLM, unique.
            ids: of the prompt.
            params: vLLM's SamplingParams.
            start: callback and limits from the first output on.

        Raises EngineDown, PromptInvalid, Retryable.
        """
        incarnation = self._alive()
        prompt = {"prompt_token_ids": ids.tolist()}
        streamed = incarnation.llm.generate(prompt, params, request, lora_request=_lora_request(adapter))
        try:
            outputs = await incarnation.call(_all(streamed, start, partial(incarnation.llm.abort, request)))
        except MarlaasError:
            raise
        except Exception as error:
            raise Retryable(f"vLLM failed {request}: {error.__cause__ or error!r}") from error
        reason = outputs[-1].outputs[0].finish_reason if outputs else None
        if reason not in ("stop", "length", *([_ABORTED] if start.is_limited else [])):
            raise EngineDown(f"vLLM ended {request} with {reason!r}")
        return outputs


def _judge_silent(incarnation: EngineIncarnation, silent_s: float) -> None:
    """Declare an engine that does not answer down if it has not computed since it was asked, or has exceeded the bound for one step.

    silent_s: seconds since the engine was asked.
    """
    found, bound_s = incarnation.standstill(True), incarnation.progress.busy_bound_s
    if found.quiet_s >= silent_s:
        incarnation.declare_down(f"vLLM has neither answered nor computed for {silent_s:.0f} s")
    elif found.still_s >= bound_s:
        incarnation.declare_down(
            f"vLLM uses the CPU, but has made no progress for {found.still_s:.0f} s; one step takes at most {bound_s:.0f} s"
        )


@dataclass(frozen=True, slots=True)
class _Start:
    """Callback and limits that apply to a request from its first output on.

    Attributes:
        began: called at the first output.
        max_s: seconds from the first output until the request is aborted; infinite for no limit.
        stops: strings that end the reply; None for none.
    """

    began: Began = unheard
    max_s: float = math.inf
    stops: Stops | None = None

    @property
    def is_limited(self) -> bool:
        """Whether this process may end the request."""
        return self.max_s < math.inf or self.stops is not None


async def _all(streamed: Any, start: _Start, abort: Callable[[], Awaitable[None]]) -> list[Any]:
    """Collect the outputs of a request until vLLM ends it.

    Once the time limit has passed, or the reply contains a stop string, abort the request. The outputs then have the tokens sampled so far.

    Args:
        streamed: vLLM's RequestOutputs, each with the tokens since the one before.
        start: callback for the first output, time limit and stop strings.
        abort: aborts the request in vLLM, which then ends the stream.
    """
    outputs: list[Any] = []
    ids: list[int] = []
    is_matched = False
    limit: asyncio.Future[None] | None = None
    try:
        async for output in streamed:
            if not outputs:
                start.began()
                limit = asyncio.ensure_future(_after(start.max_s, abort)) if start.max_s < math.inf else None
            outputs.append(output)
            if start.stops is not None and not is_matched:
                checked = len(ids)
                ids += output.outputs[0].token_ids
                is_matched = start.stops.end(ids, checked) is not None
                if is_matched and not output.finished:
                    await abort()
    finally:
        if limit is not None:
            limit.cancel()
            await asyncio.gather(limit, return_exceptions=True)  # An engine that is down fails the stream, too.
    return outputs


async def _after(delay_s: float, act: Callable[[], Awaitable[None]]) -> None:
    await asyncio.sleep(delay_s)
    await act()


def _rank(adapter: LoadedAdapter) -> int:
    return read_config(adapter.folder).rank


def refusal(adapter: LoadedAdapter, error: Exception) -> Exception:
    """Translate vLLM's error about an adapter into this role's; return EngineDown, OutOfMemory or LoadFailed.

    Device errors become EngineDown or OutOfMemory, not LoadFailed: a refused adapter is never served again.
    """
    if isinstance(error, EngineDown | LoadFailed):
        return error
    words = (
        str(error)
        if isinstance(error, AdapterInvalid | PromptInvalid)
        else str(error).partition("failed: ")[2] or repr(error)
    )
    if says_lost(words):  # vLLM returns this error and continues to run, until the next step ends it.
        return EngineDown(f"its device is lost: {words}")
    return (OutOfMemory if says_no_memory(words) else LoadFailed)(f"{adapter.name}: {words}")


def _lora_request(adapter: LoadedAdapter) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=adapter.name, lora_int_id=adapter.slot_id, lora_path=str(adapter.folder))


def _sampling(sampling: Sampling, max_tokens: int, end_ids: frozenset[int]) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        seed=sampling.seed,
        max_tokens=max_tokens,
        stop_token_ids=sorted(end_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=_LAST_AT_ONCE if sampling.stops is None else 1,
        skip_clone=True,
    )


def _scoring() -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    final = RequestOutputKind.FINAL_ONLY
    return SamplingParams(max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False, output_kind=final)


def _completion(outputs: Sequence[Any], sampling: Sampling) -> Completion:
    parts = [output.outputs[0] for output in outputs]
    ids = tuple(chain.from_iterable(part.token_ids for part in parts))
    reason = parts[-1].finish_reason
    # An output of an aborted request that has no new tokens repeats the logprobs of the earlier outputs.
    logprobs = tuple(chain.from_iterable(part.logprobs.logprobs[: len(part.token_ids)] for part in parts))
    end = None if sampling.stops is None else sampling.stops.end(ids)
    ended = reason == "stop" and end in (None, len(ids))
    is_overtime = reason == _ABORTED and end is None
    return Completion(
        output_ids=ids[:end],  # vLLM may have sampled on before it was told to end.
        logprobs=logprobs[:end],
        stop_reason=StopReason.LENGTH
        if is_overtime
        else stop_reason(ended, len(ids), sampling, matched=end is not None),
        cached_tokens=outputs[-1].num_cached_tokens or 0,
        is_overtime=is_overtime,
    )


def _clock() -> float:
    return asyncio.get_running_loop().time()
