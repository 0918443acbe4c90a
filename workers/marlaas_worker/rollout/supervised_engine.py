"""The engine as the role uses it: tested at each start, restarted after each failure (an exit or a hang), and metered.

From a failure until the next incarnation serves, the engine's calls raise EngineDown. All loaded adapters are lost with
an incarnation. The limiter of requests, the meter of the engine time and tokens that tenants, jobs and agents use, and the
counts of failures by prompt (`EngineFailures`) are the same for all incarnations. A prompt with which the engine has failed
three times is refused. The meter is pure: its callers pass the clock, in seconds.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from marlaas_api.background import background
from marlaas_api.errors import MarlaasError, Permanent
from marlaas_api.messages import JobAgent
from marlaas_worker.rollout.engine import (
    Began,
    Completion,
    Engine,
    EngineDown,
    EngineLimits,
    LoadedAdapter,
    Sampling,
    unheard,
)
from marlaas_worker.rollout.engine_progress import EngineCounts
from marlaas_worker.rollout.request_limiter import RequestLimiter
from marlaas_worker.rollout.self_test import SelfTestFailed
from marlaas_worker.rollout.served_jobs import Failures, ServedJob

HEALTH_CHECK_S = 5.0
MAX_ENGINE_FAILURES = 3
"""Failures of the engine with a prompt, or with one request, after which the request is refused."""
RESTART_BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0)
TOKENS_HALF_LIFE_S = 60.0
"""Age in seconds at which an agent's tokens count half."""
_INITIAL_TOKEN_S, _LAST_PART = 0.02, 0.1
"""Seconds per generated token before the first generation has ended; and the last generation's part of the moving average."""
_FAILURES_BYTES = 1024
"""Estimated bytes of memory of a cached `Failures`, with its key and error text."""
_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class RecentSums:
    """Sums of amounts by key, in which an amount counts less with its age.

    Args:
        half_life_s: age in seconds at which an amount counts half.
        least: sums below it are dropped.
    """

    half_life_s: float
    least: float
    _sums: dict[str, float] = field(default_factory=dict)
    _at: float = 0.0

    def add(self, amounts: Mapping[str, float], now: float) -> None:
        """Add amounts, by key, to the sums. now: not before that of earlier calls."""
        self._sums = self.at(now)
        self._at = now
        for key, amount in amounts.items():
            self._sums[key] = self._sums.get(key, 0.0) + amount

    def at(self, now: float) -> dict[str, float]:
        """Return the sums by key at the time `now`."""
        factor = 0.5 ** ((now - self._at) / self.half_life_s)
        return {key: total * factor for key, total in self._sums.items() if total * factor >= self.least}


def recent_tokens() -> RecentSums:
    """Return empty sums of agents' recent tokens, by policy key. A sum below one token is dropped."""
    return RecentSums(TOKENS_HALF_LIFE_S, 1.0)


@dataclass(frozen=True, slots=True)
class Computed:
    """Tokens that the engine computed for a request. num_prompt: of its prompt, without those from the prefix cache."""

    num_prompt: int = 0
    num_generated: int = 0

    @property
    def cost(self) -> int:
        """Tokens that the request is charged: both numbers together."""
        return self.num_prompt + self.num_generated


@dataclass(slots=True)
class DecodeTime:
    """Moving average of a request's seconds per generated token. The tokens of unfinished generations are estimated with it."""

    _token_s: float = _INITIAL_TOKEN_S

    def note(self, seconds: float, num_tokens: int) -> None:
        """Record a complete generation. seconds: since its first token."""
        if num_tokens:
            self._token_s += _LAST_PART * (seconds / num_tokens - self._token_s)

    def tokens_in(self, seconds: float, max_tokens: int) -> int:
        """Estimate the number of tokens generated for a request in these seconds: at least one, at most `max_tokens`."""
        return min(max_tokens, 1 + int(seconds / max(self._token_s, 1e-6)))


@dataclass(slots=True)
class EngineMeter:
    """Counts engine time and tokens since the role's start. The totals of single jobs are in `ServedJob.used`.

    While n requests are in the engine, each of them is charged 1/n of the time.

    Attributes:
        busy_s: seconds with requests in the engine.
        num_running: requests in the engine now.
        tenant_tokens: prompt and output tokens that the engine computed, by tenant.
        agents: sums of the same tokens by the agent's policy key, only of jobs with several policies; a token counts half after TOKENS_HALF_LIFE_S.
        decode: recent average of seconds per generated token.
    """

    busy_s: float = 0.0
    num_running: int = 0
    tenant_tokens: Counter[str] = field(default_factory=Counter)
    agents: RecentSums = field(default_factory=recent_tokens)
    decode: DecodeTime = field(default_factory=DecodeTime)
    _share_s: float = 0.0
    _at: float = 0.0  # Only used while a request runs; the first `enter` sets it.

    def enter(self, now: float) -> float:
        """Count a request that enters the engine; return the mark to pass to `leave`."""
        self.advance(now)
        self.num_running += 1
        return self._share_s

    def leave(self, mark: float, now: float) -> float:
        """Count a request that leaves the engine; return its share of the engine's time, in seconds. mark: from its `enter`."""
        self.advance(now)
        self.num_running -= 1
        return self._share_s - mark

    def charge(self, job: ServedJob, computed: Computed, share_s: float, served: JobAgent, now: float) -> None:
        """Add the use of a request to the totals of its job and tenant, and of the agent whose policy it used.

        Args:
            job: the job of the request.
            computed: tokens that the engine computed for the request.
            share_s: the request's share of the engine's time in seconds, from `leave`.
            served: the agent whose policy generated.
        """
        job.used.add(computed.num_generated, share_s)
        self.tenant_tokens[served.document.tenant] += computed.cost
        if len(served.document.spec.policies) > 1:
            self.agents.add({served.policy_key: computed.cost}, now)

    def unfinished(self, num_prompt: int, running_s: float | None, max_tokens: int) -> Computed:
        """Estimate the tokens that the engine computed for a request that was cancelled or failed: the engine does not report them.

        Args:
            num_prompt: prompt tokens outside the prefix cache, as estimated at the entry.
            running_s: seconds since the first token; None if there was none. The prompt counts in that case too, because the engine
                may have computed nearly all of it.
            max_tokens: most tokens that the request could generate.
        """
        return Computed(num_prompt, 0 if running_s is None else self.decode.tokens_in(running_s, max_tokens))

    def advance(self, now: float) -> None:
        """Add the time since the last call to `busy_s`, and divide it equally among the running requests."""
        if self.num_running:
            self.busy_s += now - self._at
            self._share_s += (now - self._at) / self.num_running
        self._at = now


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

    def of(self, job: ServedJob, prompt_ids: npt.NDArray[np.int32], own: Failures) -> Failures:
        """Return the failures of the engine with a job's prompt, or those of one request, if they are more. own: of the request alone."""
        shared = job.failures.get(_prompt_key(prompt_ids)) if len(job.failures) else None
        return own if shared is None or shared.number < own.number else shared

    def note(
        self, job: ServedJob, prompt_ids: npt.NDArray[np.int32], known: Failures, own: Failures, text: str
    ) -> Failures:
        """Record a failure of the engine while it ran a request, and return the request's own failures.

        known: the result of `of` when the request was given to the engine. own: the request's own before this one. text: the error.
        """
        key = _prompt_key(prompt_ids)
        shared = self._more(known, text)
        found = job.failures.get(key)
        if found is None or found.number < shared.number:
            job.failures.put(key, shared, _FAILURES_BYTES)
        return self._more(own, text)

    def _more(self, before: Failures, text: str) -> Failures:
        return Failures(before.number + 1, before.since if before.number else self._num_generated, text)

    def generated(self, job: ServedJob, prompt_ids: npt.NDArray[np.int32]) -> None:
        """Record that the engine has generated a reply to a prompt, and forget the failures with this prompt."""
        self._num_generated += 1
        if len(job.failures):
            job.failures.drop(_prompt_key(prompt_ids))

    def verdict(self, job: ServedJob, prompt_ids: npt.NDArray[np.int32], found: Failures, turn: str) -> EngineKilled:
        """Return the error of a request whose prompt is not run again.

        If the engine has generated nothing else since the first failure, the failures may have another cause than the prompt. The next
        request with the prompt, such as that of another attempt at the episode, is then run once, alone in the engine.

        found: the failures with the prompt, from `of`. turn: name of the request's turn, for the error's text.
        """
        is_sure = self._num_generated > found.since
        if not is_sure:
            once = replace(found, number=MAX_ENGINE_FAILURES - 1)
            job.failures.put(_prompt_key(prompt_ids), once, _FAILURES_BYTES)
        text = f"the engine failed {found.number} times while it ran the prompt of turn {turn}; last: {found.last}"
        advice = "change the prompt, or ask the platform team, who finds the cause in the log of the rollout role"
        return EngineKilled(f"{text}; {advice}" if is_sure else text, is_sure=is_sure)


def _prompt_key(prompt_ids: npt.NDArray[np.int32]) -> bytes:
    return hashlib.sha256(prompt_ids.tobytes()).digest()


class SupervisedEngine:
    """An `engine.Engine` that is tested at each start and restarted after a failure.

    Args:
        engine: the engine to supervise, not started yet.
        test: called with the engine at each start; if the test raises, the incarnation does not serve.
        engine_stopped: called after each failure, with its reason.
        engine_restarted: called after each successful restart.

    Attributes:
        limiter: limits the requests in the engine; the same for all incarnations.
        meter: counts the requests' engine time and tokens; the same for all incarnations.
        failures: counts failures of the engine by prompt; the same for all incarnations.
        slot_numbers: source of `LoadedAdapter.slot_id` for every load into this engine.
        up: whether the engine serves.
        incarnation: number of the current incarnation, from 0; each failure adds 1.
        restarts: number of successful restarts.
    """

    def __init__(
        self,
        engine: Engine,
        test: Callable[[Engine], Awaitable[None]],
        engine_stopped: Callable[[str], None],
        engine_restarted: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._test = test
        self._on_stopped = engine_stopped
        self._on_restarted = engine_restarted
        self._down = asyncio.Event()
        self.limiter = RequestLimiter(engine.limits.max_num_seqs)
        self.meter = EngineMeter()
        self.failures = EngineFailures()
        self.slot_numbers: Iterator[int] = count(1)
        self.up = False
        self.incarnation = 0
        self.restarts = 0

    @property
    def base(self) -> str:
        return self._engine.base

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    @property
    def counts(self) -> EngineCounts:
        return self._engine.counts

    async def start(self) -> None:
        await self._engine.start()
        await self._admit()

    async def restart(self) -> None:
        await self._engine.restart()
        await self._admit()

    async def stop(self) -> None:
        self.up = False
        await self._engine.stop()

    async def load(self, adapter: LoadedAdapter) -> str:
        return await self._call(self._engine.load(adapter))

    async def unload(self, adapter: LoadedAdapter) -> None:
        await self._call(self._engine.unload(adapter))

    async def digest(self, adapter: LoadedAdapter) -> str:
        return await self._call(self._engine.digest(adapter))

    async def score(self, adapter: LoadedAdapter, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        return await self._call(self._engine.score(adapter, ids))

    async def generate(
        self,
        request: str,
        adapter: LoadedAdapter,
        prompt_ids: npt.NDArray[np.int32],
        sampling: Sampling,
        began: Began = unheard,
    ) -> Completion:
        return await self._call(self._engine.generate(request, adapter, prompt_ids, sampling, began))

    async def healthy(self) -> bool:
        return self.up and await self._engine.healthy()

    def report(self, incarnation: int, reason: str) -> None:
        """Report that an incarnation has failed, so that the engine is restarted. Ignored for an earlier incarnation, or if the engine is down.

        incarnation: the value of `incarnation` before the call that failed. reason: for the log, and for `engine_stopped`.
        """
        if incarnation != self.incarnation or not self.up:
            return
        _log.error("the engine failed and is restarted: %s", reason)
        self.up = False
        self.incarnation += 1
        self._on_stopped(reason)
        self._down.set()

    async def supervise(self) -> None:
        """Check the engine's health, and restart it after each failure, until cancelled.

        Raises the engine's error if all attempts to restart it fail, and SelfTestFailed at once if a restarted engine fails its test.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._check(), name="engine health")
            group.create_task(self._restart_after_failures(), name="engine restart")

    async def _admit(self) -> None:
        """Test a new incarnation, set the limiter to the sizes of its KV cache and of its steps, and let requests use it."""
        async with background(self._check_tested()):
            await self._test(self._engine)
        self.limiter.set_kv_tokens(self._engine.limits.kv_tokens)
        self.limiter.prefill.step_tokens = self._engine.limits.step_tokens
        self.up = True

    async def _check_tested(self) -> None:
        """Check the engine's health while it is tested. A failed check makes the pending calls of the test raise EngineDown."""
        is_healthy = True
        while is_healthy:
            await asyncio.sleep(HEALTH_CHECK_S)
            is_healthy = await self._engine.healthy()

    async def _call(self, work: Awaitable[T]) -> T:
        incarnation = self.incarnation
        try:
            return await work
        except EngineDown as error:
            self.report(incarnation, str(error))
            raise

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_CHECK_S)
            incarnation = self.incarnation
            if self.up and not await self._engine.healthy():
                self.report(incarnation, "it does not answer its health check")

    async def _restart_after_failures(self) -> None:
        while True:
            await self._down.wait()
            self._down.clear()
            await self._restart_with_backoff()
            self.restarts += 1
            self._on_restarted()

    async def _restart_with_backoff(self) -> None:
        for attempt, wait_s in enumerate(RESTART_BACKOFF_S, start=1):
            await asyncio.sleep(wait_s)
            try:
                await self.restart()
            except SelfTestFailed:
                raise  # The same engine on the same machine would fail again.
            except MarlaasError:
                _log.exception("engine restart %d of %d failed", attempt, len(RESTART_BACKOFF_S))
                if attempt == len(RESTART_BACKOFF_S):
                    raise
            else:
                return
