"""An engine whose replies are scripted, and a tokenizer of characters. The engine reads adapters and answers for what it read, as a real one does."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from marlaas.models.chat_template import ReplyFrame
from marlaas_api.messages import AdaptedLayer, Calibration, ChatMessage, Probe, SelfTestSpec, StopReason
from marlaas_api.wire import pack_ids, pack_logprobs
from marlaas_worker import adapters
from marlaas_worker.calibration import draw_adapter
from marlaas_worker.rollout.conversation import BadAppend
from marlaas_worker.rollout.engine import Completion, EngineDown, EngineLimits, LoadedAdapter, LoadFailed, Sampling
from marlaas_worker.rollout.engine_progress import EngineCounts

END = 1
POOL = "pool"
PROBE = np.arange(10, 18, dtype=np.int32)
COUNTS = EngineCounts(steps=9, requests=2000, preemptions=2, queued_steps=3, queued=1)
LIMITS = EngineLimits(slots=4, max_rank=8, max_model_len=1000, max_num_seqs=16, dtype="float32")


class CharacterTokenizer:
    """One id per character; `~` is the end token. A template of one line per message; it trims on demand."""

    end_ids = frozenset({END})
    frame = ReplyFrame()
    begin_ids = ()

    def __init__(self, trims=False):
        self.trims = trims

    def render(self, messages, tools=()):
        if not messages:
            raise BadAppend("no messages")
        said = [(one.role, one.content.strip() if self.trims else one.content) for one in messages]
        return "".join(f"<{role}>{content}~" for role, content in said) + "<assistant>"

    vocabulary = "of characters"

    def whole(self, messages, tools=()):
        return self.render(messages).removesuffix("<assistant>")

    def encode(self, text):
        return [END if character == "~" else ord(character) for character in text]

    def decode(self, ids):
        return "".join(chr(token) for token in ids if token != END)

    def past(self, text, before, tools):
        return (ChatMessage(role="assistant", content=text),)

    def parts(self, ids, before, tools):
        return None

    def token_text(self, token):
        return "~" if token == END else chr(token)


SELF_TEST = "self-test."


@dataclass
class Call:
    adapter: LoadedAdapter
    prompt_ids: list[int]
    sampling: Sampling


@dataclass
class ScriptedEngine:
    """See `engine.Engine`. `open` lets generations end; `reply` is what it draws; `deaths` generations kill it first; `twist` falsifies loads;
    `overtime`: generations take too long; `queues`: it keeps requests in a queue of its own until it is opened; without `applies` its slots hold adapters and are not used.
    """

    limits: EngineLimits = LIMITS
    base: str = "base"
    reply: str = "yes~"
    deaths: int = 0
    queues: bool = False
    overtime: bool = False
    refuse: str = ""
    applies: bool = True
    twist: Callable[[Path], Path] = lambda folder: folder
    counts: EngineCounts = COUNTS
    starts: int = 0
    open: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    called: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[Call] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    unloads: list[str] = field(default_factory=list)
    _held: dict[LoadedAdapter, Path] = field(default_factory=dict)
    _begun: list[Any] = field(default_factory=list)
    _down: Any = None

    async def start(self):
        self.starts += 1
        self._down = asyncio.get_running_loop().create_future()

    async def restart(self):
        await self.stop()
        await self.start()

    async def stop(self):
        self.die("stopped")
        self._held.clear()

    def die(self, reason="killed"):
        if self._down is not None and not self._down.done():
            self._down.set_result(reason)

    async def load(self, adapter):
        self._check()
        if self.refuse and self.refuse in adapter.name:
            raise LoadFailed(f"{adapter.name}: the engine does not like it")
        if len(self._held) >= self.limits.slots or any(held.name == adapter.name for held in self._held):
            raise LoadFailed(f"{adapter.name}: no room, or loaded already")
        self._held[adapter] = self.twist(adapter.folder)
        if not adapter.name.startswith(SELF_TEST):
            self.loads.append(adapter.name)
        return await self.digest(adapter)

    async def unload(self, adapter):
        self._check()
        if self._held.pop(adapter, None) is not None and not adapter.name.startswith(SELF_TEST):
            self.unloads.append(adapter.name)

    async def digest(self, adapter):
        self._check()
        tensors, config = adapters.read_adapter(self._held[adapter])
        return adapters.tensor_digests(tensors, config.scaling)[self.limits.dtype]

    async def score(self, adapter, ids):
        self._check()
        return np.full(len(ids) - 1, gain(self._held[adapter]) if self.applies else 0.0, np.float32)

    async def generate(self, request, adapter, prompt_ids, sampling, began=lambda: None):
        self._check()
        if adapter not in self._held:
            raise LoadFailed(f"{adapter.name} is not loaded")
        if adapter.name.startswith(SELF_TEST):
            return Completion((ord("a"),), tuple(await self.score(adapter, prompt_ids))[:1], StopReason.LENGTH)
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
        if self.overtime:
            ids = ids[:2]
        stop = StopReason.STOP if ids[-1] == END else StopReason.LENGTH
        return Completion(tuple(ids), tuple(-0.5 for _ in ids), stop, is_overtime=self.overtime)

    def begin_all(self):
        for began in self._begun:
            began()

    async def healthy(self):
        return self._down is not None and not self._down.done()

    async def _let_go(self):
        opened = asyncio.ensure_future(self.open.wait())
        try:
            await asyncio.wait((opened, self._down), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.aborted.set()
            raise
        finally:
            opened.cancel()
        self._check()

    def _check(self):
        if self._down is None or self._down.done():
            raise EngineDown(self._down.result() if self._down else "not started")


def gain(folder):
    return mean_of(adapters.read_adapter(folder)[0])


def mean_of(tensors):
    return float(tensors[adapters.tensor_name("layer", "B")].float().mean())


def calibration_of(engine):
    """What a trainer would write for such an engine; the self-test's adapter moves every logprob by 0.4 or so."""
    layers, dtype = {"layer": AdaptedLayer(rows=4, columns=4, size=2.0)}, engine.limits.dtype
    drawn = SelfTestSpec(seed=1, rank=8, layers=layers, sha256="", logprobs=(), tolerance=1e-4)
    tensors, config = draw_adapter(drawn, dtype)
    sha256, logprobs = adapters.tensor_digest(tensors, config.scaling, dtype), (pack_logprobs([mean_of(tensors)] * 7),)
    return Calibration(
        **{"pool": POOL, "base": engine.base, "dtype": dtype, "noise": 0.0, "tolerance": 1e-4, "trainer": "trainer-0"},
        probes=(Probe(ids=pack_ids(PROBE), logprobs=pack_logprobs([0.0] * 7)),),
        self_test=drawn.model_copy(update={"sha256": sha256, "logprobs": logprobs}),
    )


def write_version(folder, seed):
    draw = torch.Generator().manual_seed(seed)
    shapes = {"A": (8, 4), "B": (4, 8)}
    tensors = {
        adapters.tensor_name("layer", kind): torch.randn(shape, generator=draw) for kind, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    files = adapters.write_adapter(tensors, adapters.AdapterConfig(8, 16, "base"))
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return files
