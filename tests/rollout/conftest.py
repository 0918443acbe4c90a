"""What the engine tests share: a small random model, published adapter versions, an independent scorer, and one engine of each kind per session."""

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import pytest_asyncio
import torch
from tests.harness import a_manifest, pool_document
from tests.random_llama import save_random_llama
from tests.rollout.chats import CHATML, bpe

from marlaas.models.tokenizer import save_tokenizer
from marlaas_api.blobs import BlobRef, sha256_hex
from marlaas_api.messages import Manifest, Probe
from marlaas_api.wire import pack_ids, pack_logprobs
from marlaas_worker.adapters import AdapterConfig, tensor_digests, tensor_name, write_adapter
from marlaas_worker.rollout.engine import LoadedAdapter
from marlaas_worker.rollout.reference_engine import ReferenceEngine
from marlaas_worker.rollout.tokenizer import PretrainedTokenizer

RANK = 4
END_IDS = frozenset({1})
PROBE_IDS = np.arange(2, 34, dtype=np.int32)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """A Llama of two layers with random weights, wide enough apart that adapters show."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = tmp_path_factory.mktemp("small-model")
    return save_random_llama(folder, 96, **sizes, max_position_embeddings=256, initializer_range=0.15)


class Published(NamedTuple):
    manifest: Manifest
    folder: Path

    def in_slot(self, slot_id):
        return LoadedAdapter(self.manifest.adapter.engine_name, slot_id, self.folder)


@pytest.fixture(scope="session")
def hf_logprobs(small_model):
    """Logprobs of ids 1.. from transformers and peft, which share no code with the engines' adapters; None is the bare base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(small_model).eval()

    def score(folder, ids, temperature):
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
def publish(small_model, hf_logprobs, tmp_path_factory):
    """Publish a version of a random adapter on every linear layer; another seed is another agent's, size 0 a zero adapter."""
    shapes = linear_shapes(small_model)

    def make(seed, version=1, size=0.2, rename=str, rank=RANK):
        draw, tensors = torch.Generator().manual_seed(1000 * seed + version), {}
        for module, (rows, columns) in shapes.items():
            tensors[tensor_name(rename(module), "A")] = torch.randn(rank, columns, generator=draw) * 0.2
            tensors[tensor_name(rename(module), "B")] = torch.randn(rows, rank, generator=draw) * size
        folder = tmp_path_factory.mktemp("adapter")
        files = write_adapter(tensors, AdapterConfig(rank, 2 * rank, "small"))
        for name, data in files.items():
            (folder / name).write_bytes(data)
        expected = hf_logprobs(folder, PROBE_IDS, 1.0) if rename is str else np.zeros(len(PROBE_IDS) - 1)
        probe = Probe(ids=pack_ids(PROBE_IDS), logprobs=pack_logprobs(expected))
        proofs = {"tensor_digests": tensor_digests(tensors, 2.0), "probes": (probe,)}
        refs = {name: BlobRef(name=name, sha256=sha256_hex(data), size_bytes=len(data)) for name, data in files.items()}
        job = SimpleNamespace(namespace="test", job="job", uid=f"u{seed}")
        return Published(a_manifest(job, version, agent="agent", rank=rank, files=refs, **proofs), folder)

    return make


def linear_shapes(model):
    from transformers import AutoModelForCausalLM

    modules = AutoModelForCausalLM.from_pretrained(model).named_modules()
    linears = {name: module for name, module in modules if isinstance(module, torch.nn.Linear)}
    return {name: (linear.out_features, linear.in_features) for name, linear in linears.items() if name != "lm_head"}


@pytest.fixture(scope="session")
def pool():
    """Six slots, rank up to 8: small enough to fill."""
    rollout = {"dtype": "float32", "maxNumSeqs": 32, "kvCacheBytes": "32Mi", "maxModelLen": 128}
    return pool_document(Path("/unused"), adapterSlots=6, maxRank=8, rollout=rollout).spec


@pytest.fixture(scope="session")
def slot_ids():
    numbers = itertools.count(1)
    return lambda: next(numbers)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def reference(small_model, pool):
    engine = ReferenceEngine(small_model, pool, END_IDS)
    await engine.start()
    yield engine
    await engine.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm(small_model, pool, tmp_path_factory):
    """The one real engine of the session; a test that ends it must have started it again."""
    from marlaas_worker.rollout.vllm_engine import VllmEngine

    folder = tmp_path_factory.mktemp("vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "compiled"))
        engine = VllmEngine(small_model, pool, END_IDS, folder, answer_bound_s=600.0, may_fork=True)
        await engine.start()
        yield engine
        await engine.stop()


class EngineHarness:
    def __init__(self, engine, next_slot):
        self.engine, self.next_slot, self.made = engine, next_slot, []

    def slot_for(self, published, folder=None):
        """A new slot for a version; its files in another folder are an attack."""
        adapter = published.in_slot(self.next_slot())
        self.made.append(replace(adapter, folder=folder or adapter.folder))
        return self.made[-1]

    async def load(self, published):
        adapter = self.slot_for(published)
        await self.engine.load(adapter)
        return adapter


@pytest.fixture(params=["reference", pytest.param("vllm", marks=pytest.mark.engine)])
def each_engine(request):
    return request.getfixturevalue(request.param)


@pytest_asyncio.fixture(loop_scope="session")
async def harness(each_engine, slot_ids):
    await each_engine.start()
    made = EngineHarness(each_engine, slot_ids)
    yield made
    for adapter in made.made:
        await each_engine.unload(adapter)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tokenizer(folder, 512)
    return PretrainedTokenizer.load(str(folder))


@pytest.fixture(scope="session")
def chatml():
    return bpe(CHATML)
