"""An engine whose replies are scripted, and a tokenizer of characters. The engine reads adapters and answers for what it read, as a real one does."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from marlaas_api.messages import AdaptedLayer, Calibration, ChatMessage, Probe, SelfTestSpec, StopReason
from marlaas_api.wire import pack_ids, pack_logprobs
from marlaas_worker.adapters import (
    AdapterConfig,
    read_adapter,
    tensor_digest,
    tensor_digests,
    tensor_name,
    write_adapter,
)
from marlaas_worker.calibration import draw_adapter
from marlaas_worker.rollout.conversation import BadAppend
from marlaas_worker.rollout.engine import (
    Began,
    Completion,
    EngineDown,
    EngineLimits,
    LoadedAdapter,
    LoadFailed,
    Sampling,
    unheard,
)
from marlaas_worker.rollout.engine_progress import EngineCounts

END = 1
POOL = "pool"
COUNTS = EngineCounts(steps=9, requests=2000, preemptions=2, queued_steps=3, queued=1)
LIMITS = EngineLimits(slots=4, max_rank=8, max_model_len=1000, max_num_seqs=16, dtype="float32")


class CharacterTokenizer:
    """One id per character; `~` is the end token. A template of one line per message; it trims on demand."""

    end_ids = frozenset({END})

    def __init__(self, trims: bool = False) -> None:
        self.trims = trims

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[str] = ()) -> str:
        if not messages:
            raise BadAppend("no messages")
        contents = [message.content.strip() if self.trims else message.content for message in messages]
        lines = [f"<{message.role}>{content}~" for message, content in zip(messages, contents, strict=True)]
        return "".join(lines) + "<assistant>"

    def encode(self, text: str) -> list[int]:
        return [END if character == "~" else ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids if token != END)

    def token_text(self, token: int) -> str:
        return "~" if token == END else chr(token)


@dataclass
class Call:
    """One generation as the engine saw it."""

    adapter: LoadedAdapter
    prompt_ids: list[int]
    sampling: Sampling


@dataclass
class ScriptedEngine:
    """See `engine.Engine`. `open` lets generations end; `reply` is what it draws; `deaths` generations kill it first; `twist` falsifies loads;
    `queues`: it keeps requests in a queue of its own until it is opened; without `applies` its slots hold adapters and are not used.
    """

    limits: EngineLimits = LIMITS
    base: str = "base"
    reply: str = "yes~"
    deaths: int = 0
    queues: bool = False
    refuse: str = ""
    applies: bool = True
    loads_fail_by: Exception | None = None
    failed_loads: int = 0
    twist: Callable[[Path], Path] = lambda folder: folder
    open: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[Call] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    unloads: list[str] = field(default_factory=list)
    counts: EngineCounts = COUNTS
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    called: asyncio.Event = field(default_factory=asyncio.Event)
    starts: int = 0
    _held: dict[LoadedAdapter, Path] = field(default_factory=dict)
    _begun: list[Began] = field(default_factory=list)
    _down: asyncio.Future[str] | None = None

    async def start(self) -> None:
        self.starts += 1
        self._down = asyncio.get_running_loop().create_future()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def stop(self) -> None:
        self.die("stopped")
        self._held.clear()

    def die(self, reason: str = "killed") -> None:
        if self._down is not None and not self._down.done():
            self._down.set_result(reason)

    async def load(self, adapter: LoadedAdapter) -> str:
        self._check()
        if self.loads_fail_by is not None:
            self.failed_loads += 1
            raise self.loads_fail_by
        if self.refuse and self.refuse in adapter.name:
            raise LoadFailed(f"{adapter.name}: the engine does not like it")
        if len(self._held) >= self.limits.slots or any(held.name == adapter.name for held in self._held):
            raise LoadFailed(f"{adapter.name}: no room, or loaded already")
        self._held[adapter] = self.twist(adapter.folder)
        if not adapter.name.startswith("self-test."):
            self.loads.append(adapter.name)
        return await self.digest(adapter)

    async def unload(self, adapter: LoadedAdapter) -> None:
        self._check()
        if self._held.pop(adapter, None) is not None and not adapter.name.startswith("self-test."):
            self.unloads.append(adapter.name)

    async def digest(self, adapter: LoadedAdapter) -> str:
        self._check()
        tensors, config = read_adapter(self._held[adapter])
        return tensor_digests(tensors, config.scaling)[self.limits.dtype]

    async def score(self, adapter: LoadedAdapter, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        self._check()
        return np.full(len(ids) - 1, gain(self._held[adapter]) if self.applies else 0.0, np.float32)

    async def generate(
        self,
        request: str,
        adapter: LoadedAdapter,
        prompt_ids: npt.NDArray[np.int32],
        sampling: Sampling,
        began: Began = unheard,
    ) -> Completion:
        self._check()
        if adapter not in self._held:
            raise LoadFailed(f"{adapter.name} is not loaded")
        self.calls.append(Call(adapter, prompt_ids.tolist(), sampling))
        self.called.set()
        self._begun.append(began)
        if not self.queues:
            began()
        if self.deaths:
            self.deaths -= 1
            self.die("this request killed it")
        await self._let_go()
        if self.queues:
            began()
        ids = CharacterTokenizer().encode(self.reply)[: sampling.max_tokens]
        stop = StopReason.STOP if ids[-1] == END else StopReason.LENGTH
        return Completion(tuple(ids), tuple(-0.5 for _ in ids), stop)

    def begin_all(self) -> None:
        """Report the first tokens of the requests in the engine's own queue."""
        for began in self._begun:
            began()

    async def healthy(self) -> bool:
        return self._down is not None and not self._down.done()

    async def _let_go(self) -> None:
        opened = asyncio.ensure_future(self.open.wait())
        try:
            await asyncio.wait((opened, self._down), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.aborted.set()
            raise
        finally:
            opened.cancel()
        self._check()

    def _check(self) -> None:
        if self._down is None or self._down.done():
            raise EngineDown(self._down.result() if self._down else "not started")


def gain(folder: Path) -> float:
    return mean_of(read_adapter(folder)[0])


def mean_of(tensors: Mapping[str, torch.Tensor]) -> float:
    return float(tensors[tensor_name("layer", "B")].float().mean())


def calibration_of(engine: ScriptedEngine) -> Calibration:
    """What a trainer would write for such an engine; the self-test's adapter moves every logprob by 0.4 or so."""
    ids = np.arange(10, 18, dtype=np.int32)
    layers = {"layer": AdaptedLayer(rows=4, columns=4, size=2.0)}
    drawn = SelfTestSpec(seed=1, rank=8, layers=layers, sha256="", logprobs=(), tolerance=1e-4)
    tensors, config = draw_adapter(drawn, engine.limits.dtype)
    expected = {
        "sha256": tensor_digest(tensors, config.scaling, engine.limits.dtype),
        "logprobs": (pack_logprobs([mean_of(tensors)] * 7),),
    }
    return Calibration(
        pool=POOL,
        base=engine.base,
        dtype=engine.limits.dtype,
        noise=0.0,
        tolerance=1e-4,
        probes=(Probe(ids=pack_ids(ids), logprobs=pack_logprobs([0.0] * 7)),),
        self_test=drawn.model_copy(update=expected),
        trainer="trainer-0",
    )


def adapter_files(seed: int) -> dict[str, bytes]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        tensor_name("layer", "A"): torch.randn(8, 4, generator=generator),
        tensor_name("layer", "B"): torch.randn(4, 8, generator=generator),
    }
    return write_adapter(tensors, AdapterConfig(8, 16, "base"))
