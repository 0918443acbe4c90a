"""What the engine tests share: a small random model, published adapter versions, an independent scorer, and one engine of each kind per session."""

import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
import torch
from tests.harness import a_manifest, pool_document
from tests.random_llama import save_random_llama
from tests.rollout.chats import CHATML, bpe

from marlaas.models.tokenizer import save_tokenizer
from marlaas_api.blobs import BlobRef, sha256_hex
from marlaas_api.messages import Manifest, PoolSpec, Probe
from marlaas_api.wire import pack_ids, pack_logprobs
from marlaas_worker.adapters import AdapterConfig, tensor_digests, tensor_name, write_adapter
from marlaas_worker.rollout.engine import Engine, LoadedAdapter
from marlaas_worker.rollout.reference_engine import ReferenceEngine
from marlaas_worker.rollout.tokenizer import PretrainedTokenizer

VOCABULARY = 96
RANK = 4
END_IDS = frozenset({1})
PROBE_IDS = np.arange(2, 34, dtype=np.int32)

Tensors = dict[str, torch.Tensor]
Ids = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with random weights, wide enough apart that adapters show."""
    return save_random_llama(
        tmp_path_factory.mktemp("small-model"),
        VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.15,
    )


@dataclass(frozen=True)
class Published:
    """A version as a trainer publishes it: its manifest, and its files in a folder."""

    manifest: Manifest
    folder: Path
    tensors: Tensors

    def in_slot(self, slot_id: int) -> LoadedAdapter:
        return LoadedAdapter(self.manifest.adapter.engine_name, slot_id, self.folder)


Publish = Callable[..., Published]
Score = Callable[[Path, Ids], Logprobs]


@pytest.fixture(scope="session")
def hf_logprobs(small_model: Path) -> Callable[[Path | None, Ids, float], Logprobs]:
    """Logprobs of ids 1.. from transformers and peft, which share no code with the engines' adapters; None is the bare base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(small_model).eval()

    def score(folder: Path | None, ids: Ids, temperature: float) -> Logprobs:
        model = base if folder is None else PeftModel.from_pretrained(base, str(folder)).eval()
        tokens = torch.from_numpy(ids.astype(np.int64))
        try:
            with torch.inference_mode():
                logits = model(input_ids=tokens[None]).logits[0, :-1].float()
        finally:
            if folder is not None:
                model.unload()
        logprobs = torch.log_softmax(logits / temperature, dim=-1).gather(1, tokens[1:, None])
        return np.asarray(logprobs[:, 0], dtype=np.float32)

    return score


@pytest.fixture(scope="session")
def score_with_peft(hf_logprobs: Callable[[Path | None, Ids, float], Logprobs]) -> Score:
    """The same at temperature 1."""
    return lambda folder, ids: hf_logprobs(folder, ids, 1.0)


@pytest.fixture(scope="session")
def wide_adapter(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of rank 16, above the pool's 8."""
    rows, columns = linear_shapes(small_model)["model.layers.0.self_attn.q_proj"]
    module = "model.layers.0.self_attn.q_proj"
    tensors = {tensor_name(module, "A"): torch.ones(16, columns), tensor_name(module, "B"): torch.ones(rows, 16)}
    folder = tmp_path_factory.mktemp("wide")
    for name, data in write_adapter(tensors, AdapterConfig(16, 16)).items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="session")
def publish(small_model: Path, score_with_peft: Score, tmp_path_factory: pytest.TempPathFactory) -> Publish:
    """Publish a version of a random adapter on every linear layer; another seed is another agent's, size 0 a zero adapter."""
    shapes = linear_shapes(small_model)

    def make(seed: int, version: int = 1, size: float = 0.2, rename: Callable[[str], str] = str) -> Published:
        generator = torch.Generator().manual_seed(1000 * seed + version)
        tensors: Tensors = {}
        for module, (rows, columns) in shapes.items():
            tensors[tensor_name(rename(module), "A")] = torch.randn(RANK, columns, generator=generator) * 0.2
            tensors[tensor_name(rename(module), "B")] = torch.randn(rows, RANK, generator=generator) * size
        folder = tmp_path_factory.mktemp("adapter")
        files = write_adapter(tensors, AdapterConfig(RANK, 2 * RANK, "small"))
        for name, data in files.items():
            (folder / name).write_bytes(data)
        expected = score_with_peft(folder, PROBE_IDS) if rename is str else np.zeros(len(PROBE_IDS) - 1)
        return Published(manifest_of(seed, version, files, tensors, expected), folder, tensors)

    return make


def linear_shapes(model: Path) -> dict[str, tuple[int, int]]:
    """Output and input width of every linear layer but the head."""
    from transformers import AutoModelForCausalLM

    modules = AutoModelForCausalLM.from_pretrained(model).named_modules()
    linears = {name: module for name, module in modules if isinstance(module, torch.nn.Linear)}
    return {name: (linear.out_features, linear.in_features) for name, linear in linears.items() if name != "lm_head"}


def manifest_of(
    seed: int, version: int, files: dict[str, bytes], tensors: Tensors, expected: npt.NDArray[np.floating]
) -> Manifest:
    blobs = {name: BlobRef(name=name, sha256=sha256_hex(data), size_bytes=len(data)) for name, data in files.items()}
    names = {"namespace": "test", "job": "job", "uid": f"u{seed}"}
    probe = Probe(ids=pack_ids(PROBE_IDS), logprobs=pack_logprobs(expected))
    proofs = {"tensor_digests": tensor_digests(tensors, 2.0), "probes": (probe,)}
    return a_manifest(SimpleNamespace(**names), version, agent="agent", rank=RANK, files=blobs, **proofs)


@pytest.fixture(scope="session")
def pool() -> PoolSpec:
    """Six slots, rank up to 8: small enough to fill."""
    rollout = {"dtype": "float32", "maxNumSeqs": 32, "kvCacheBytes": "32Mi", "maxModelLen": 128}
    return pool_document(Path("/unused"), adapterSlots=6, maxRank=8, rollout=rollout).spec


@pytest.fixture(scope="session")
def slot_ids() -> Callable[[], int]:
    """Numbers that no slot of this session has had."""
    numbers = itertools.count(1)
    return lambda: next(numbers)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def reference(small_model: Path, pool: PoolSpec) -> AsyncIterator[Engine]:
    engine = ReferenceEngine(small_model, pool, END_IDS)
    await engine.start()
    yield engine
    await engine.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm(small_model: Path, pool: PoolSpec, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    """The one real engine of the session; a test that ends it must have started it again."""
    from marlaas_worker.rollout.vllm_engine import VllmEngine

    folder = tmp_path_factory.mktemp("vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "compiled"))
        engine = VllmEngine(small_model, pool, END_IDS, folder, answer_bound_s=600.0, may_fork=True)
        await engine.start()
        yield engine
        await engine.stop()


@dataclass(frozen=True)
class EngineHarness:
    """An engine, and adapters that are gone from it when the test ends."""

    engine: Engine
    next_slot: Callable[[], int]
    made: list[LoadedAdapter]

    def slot_for(self, published: Published, folder: Path | None = None) -> LoadedAdapter:
        """A new slot for a version; its files in another folder are an attack."""
        adapter = LoadedAdapter(published.manifest.adapter.engine_name, self.next_slot(), folder or published.folder)
        self.made.append(adapter)
        return adapter

    async def load(self, published: Published) -> LoadedAdapter:
        adapter = self.slot_for(published)
        await self.engine.load(adapter)
        return adapter

    async def empty(self) -> None:
        for adapter in self.made:
            await self.engine.unload(adapter)


@pytest.fixture(params=["reference", pytest.param("vllm", marks=pytest.mark.engine)])
def each_engine(request: pytest.FixtureRequest) -> Engine:
    """Each kind of engine in turn."""
    engine: Engine = request.getfixturevalue(request.param)
    return engine


@pytest_asyncio.fixture(loop_scope="session")
async def harness(each_engine: Engine, slot_ids: Callable[[], int]) -> AsyncIterator[EngineHarness]:
    await each_engine.start()
    made = EngineHarness(each_engine, slot_ids, [])
    yield made
    await made.empty()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> PretrainedTokenizer:
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_tokenizer(folder, 512)
    return PretrainedTokenizer.load(str(folder))


@pytest.fixture(scope="session")
def chatml() -> PretrainedTokenizer:
    return bpe(CHATML)
