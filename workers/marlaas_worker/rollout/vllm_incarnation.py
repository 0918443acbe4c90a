"""One run of vLLM's processes: start, watch and end them, so that no call waits for an engine that has exited.

vLLM starts a core process, which on a GPU starts the workers and on a CPU is the worker. This module notices when the core exits. If this process
exits, the watch in the workers ends vLLM's processes (`vllm_extension`).

The core process can be forked from the role, so that vllm is imported once and not twice in a row. The two imports were nine tenths of
an engine's start on a CPU. Only the first core of a role is forked: later the role has threads of other libraries, whose locks and
OpenMP teams a fork would copy in any state. CUDA does not survive a fork, so on a GPU the core is forked only if the role has not
initialized CUDA. So that torch can look for GPUs without CUDA, it is told to ask NVML, the driver's management library; vLLM does the
same. This module removes from the forked process all that belongs to the role.
"""

import asyncio
import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import stat
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import psutil
import torch

from marlaas_worker.rollout import vllm_extension
from marlaas_worker.rollout.engine import EngineDown, PromptInvalid, unless_down
from marlaas_worker.rollout.engine_progress import (
    COUNTERS,
    EngineCounters,
    EngineCounts,
    ProgressWatch,
    Standstill,
    create_counters,
)
from marlaas_worker.rollout.vllm_settings import (
    START_METHOD,
    VllmSettings,
    engine_arguments,
    environment,
    first_error,
    longest_silence_s,
    num_threads,
    start_failure,
    write_log_config,
)

T = TypeVar("T")
CORE_PROCESS = "EngineCore"
ABANDON_CHECK_S = 0.5
_LOOKS_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
os.environ.setdefault(_LOOKS_BY_NVML, "1")  # before the role asks for a GPU; vLLM sets it at import, which is later
_NETWORK = (socket.AF_INET, socket.AF_INET6)
_threads: int | None = None
"""Compute threads of the process that is about to be forked; None: no core is being forked."""


class EngineIncarnation:
    """One run of vLLM's processes.

    Attributes:
        llm: vLLM's AsyncLLM; None after `end`.
        down: future whose result is the reason why the processes have exited or were given up; pending while they run.
        kv_tokens: tokens that fit into the KV cache, without the one block that holds no request's tokens.
        step_tokens: most tokens of one step.
        num_calls: calls that wait for vLLM's answer.
        progress: watches whether vLLM's counters move while it has work.
        processes: vLLM's processes, the core first.
    """

    def __init__(self, built: "_Built", settings: VllmSettings) -> None:
        self.llm = llm = built.llm
        self.down: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        cache = llm.vllm_config.cache_config
        self.kv_tokens: int = max(0, (cache.num_gpu_blocks or 0) - 1) * cache.block_size
        self.step_tokens: int = llm.vllm_config.scheduler_config.max_num_batched_tokens
        self.num_calls = 0
        self.progress = ProgressWatch(built.busy_bound_s)
        self._counters = built.counters
        self._log = settings.log
        self._answered = 0  # The log's length at vLLM's last error that did not end it.
        self._cores = tuple(llm.engine_core.resources.engine_manager.processes)
        for core in self._cores:
            self.down.get_loop().add_reader(core.sentinel, self._core_ended)
        owners = [psutil.Process(core.pid) for core in self._cores]
        self.processes = tuple(owners + [child for owner in owners for child in owner.children(recursive=True)])

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Await the answer of a call to vLLM (`work`). Raises EngineDown if vLLM exits first: vLLM's own calls would then wait for ever.

        Also raises PromptInvalid if vLLM refuses the request, and vLLM's other errors if it continues to run.
        """
        from vllm.exceptions import VLLMClientError

        self.num_calls += 1
        try:
            return await unless_down(work, self.down)
        except VLLMClientError as error:
            raise PromptInvalid(str(error)) from error
        except EngineDown:
            raise
        except Exception as error:
            if self.llm.errored:  # Not chained: vLLM raises the same exception object in every request.
                raise EngineDown(first_error(self._log, self._answered) or str(error)) from None
            self._answered = self._log.stat().st_size
            raise
        finally:
            self.num_calls -= 1

    @property
    def counts(self) -> EngineCounts:
        """Counters of this incarnation's work so far."""
        return self._counters.read()

    def standstill(self, has_work: bool) -> Standstill:
        """Return how long these processes have done nothing. has_work: whether they have something to do; if not, the times are 0."""
        return self.progress.look(has_work, self.counts, self._cpu_s(), self.down.get_loop().time())

    def _cpu_s(self) -> float:
        """Return the CPU time of vLLM's processes so far, in seconds; processes that have exited count as 0."""
        total = 0.0
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def declare_down(self, reason: str) -> None:
        """Set `down`, with the reason and the first error in vLLM's log. Does nothing if `down` is set already."""
        if not self.down.done():
            words = first_error(self._log, self._answered)
            self.down.set_result(f"{reason}: {words}" if words else reason)

    async def end(self) -> None:
        """End every process of this incarnation, and release vLLM's objects. Pending calls raise EngineDown. May be called only once."""
        was_down = self.down.done()
        self.declare_down("the engine was stopped")
        for core in self._cores:
            self.down.get_loop().remove_reader(core.sentinel)
        await asyncio.to_thread(self._shut_down, was_down)
        await asyncio.sleep(0)  # vLLM closes its sockets in a callback of this loop
        self.llm.engine_core.resources.ctx.destroy(linger=0)
        self.llm.shutdown = _done  # `AsyncLLM.__del__` calls it again, at the interpreter's exit without vLLM's modules
        self.llm = None
        gc.unfreeze()  # `process_setup.collect_once_ready` has excluded this incarnation's objects.
        gc.collect()  # vLLM's objects form cycles, and print errors if they are collected at the interpreter's exit.

    def _core_ended(self) -> None:
        for core in self._cores:
            self.down.get_loop().remove_reader(core.sentinel)
        self.declare_down(f"vLLM's core process ended with code {self._cores[0].exitcode}")

    def _shut_down(self, by_force: bool) -> None:
        if by_force:
            _kill(self.processes)
        self.llm.shutdown()
        _kill(self.processes)


def _done() -> None:
    """Do nothing. Replaces `AsyncLLM.shutdown` once the engine is shut down, because `AsyncLLM.__del__` calls it again."""


@dataclass(frozen=True, slots=True)
class _Built:
    """A running engine.

    Attributes:
        llm: vLLM's AsyncLLM.
        counters: of the engine's work.
        busy_bound_s: most seconds that a healthy engine computes while the counters stand still.
    """

    llm: Any
    counters: EngineCounters
    busy_bound_s: float


async def start_incarnation(settings: VllmSettings, forks: bool) -> EngineIncarnation:
    """Start vLLM. On cancellation, wait until the started processes have ended.

    Args:
        forks: fork the core process from this one (`forking`), instead of spawning it.

    Raises:
        InvalidInput, Permanent: with the error text of the process that failed (`start_failure`).
    """
    others = {child.pid for child in multiprocessing.active_children()}
    building = asyncio.ensure_future(asyncio.to_thread(_build, settings, forks))
    try:
        return EngineIncarnation(await asyncio.shield(building), settings)
    except asyncio.CancelledError:
        while not building.done():
            started = [child for child in multiprocessing.active_children() if child.pid not in others]
            _kill(psutil.Process(core.pid) for core in started if core.name == CORE_PROCESS)
            await asyncio.wait({building}, timeout=ABANDON_CHECK_S)
        if building.exception() is None:
            building.result().llm.shutdown()
        raise


def _build(settings: VllmSettings, forks: bool) -> _Built:
    log_config = write_log_config(settings)
    counters = create_counters(settings.counters)
    variables = {
        **environment(settings, forks),
        vllm_extension.OWNER: vllm_extension.owner_token(),
        COUNTERS: str(settings.counters),
    }
    with _variables(variables), forking(num_threads(settings)) if forks else contextlib.nullcontext():
        try:
            llm = _construct(engine_arguments(settings, log_config), variables[START_METHOD])
            batch_tokens = llm.vllm_config.scheduler_config.max_num_batched_tokens
            return _Built(llm, counters, longest_silence_s(settings, batch_tokens))
        except Exception as error:
            _close_sockets(error.__traceback__)
            words = first_error(settings.log) or str(error)
    raise start_failure(words, settings.log)


def _construct(arguments: dict[str, Any], start_method: str) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    config = AsyncEngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
    os.environ[START_METHOD] = start_method  # vLLM's CPU platform has just set it to "spawn"
    return AsyncLLM.from_vllm_config(config, disable_log_stats=arguments["disable_log_stats"])


def _close_sockets(trace: TracebackType | None) -> None:
    """Close the sockets that vLLM's client leaves open if its constructor fails. Only the frames of the traceback refer to the client."""
    while trace is not None:
        resources = getattr(trace.tb_frame.f_locals.get("self"), "resources", None)
        if resources is not None:
            resources.ctx.destroy(linger=0)
        trace = trace.tb_next


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@contextlib.contextmanager
def _variables(wanted: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def fork_obstacle() -> str:
    """Return why a core process that uses a GPU cannot be forked from this process; empty if it can."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "CUDA is initialized in the role"
    if os.environ.get(_LOOKS_BY_NVML) != "1":
        return f"{_LOOKS_BY_NVML} is not 1, so torch has asked CUDA for GPUs in the role"
    cannot_count = torch.cuda._device_count_nvml() < 0  # as of a part of a card (MIG); torch then asks CUDA
    return (
        "the driver's management library cannot count the GPUs, so torch has asked CUDA in the role"
        if cannot_count
        else ""
    )


@contextlib.contextmanager
def forking(threads: int) -> Iterator[None]:
    """Make every process that is forked in this context a core process (`_leave_role`). threads: number of its compute threads."""
    global _threads
    before, _threads = _threads, threads
    try:
        yield
    finally:
        _threads = before


def _leave_role() -> None:
    """Remove the role's signal handlers and connections from a forked core process, and apply vLLM's settings to it.

    Runs in every forked process, and does nothing in one that is not a core process.
    """
    if _threads is None:
        return
    # Otherwise a signal to this process would wake the role's event loop, which would take the signal for its own.
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    drop_connections()
    # A spawned process reads these settings from its environment. A forked one has inherited the role's.
    torch.set_num_threads(_threads)
    importlib.import_module("torch._dynamo").config.disable = os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    # A spawned process is prepared when it imports `vllm_extension`. The role imported it without OWNER, so without effect.
    vllm_extension.prepare_process()


os.register_at_fork(after_in_child=_leave_role)


def drop_connections() -> None:
    """Replace this process's network sockets by /dev/null: its connections to bus and store, and its health server, are the role's.

    The descriptors are not closed: the inherited objects will close them by number, which could then be the number of another file.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for name in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this iteration is closed already
            if _is_network(int(name.name)):
                os.dup2(null, int(name.name), inheritable=False)
    os.close(null)


def _is_network(descriptor: int) -> bool:
    """Return whether a descriptor is an internet socket. Raises OSError if it is closed."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        return copy.family in _NETWORK
