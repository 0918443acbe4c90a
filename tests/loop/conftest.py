import asyncio
import json

import pytest
import torch
import uvloop
from tests.loop import runs
from tests.random_llama import save_random_llama

from marlaas.models import prepare
from marlaas.models.tokenizer import END, PAD, VOCABULARY, save_tokenizer
from marlaas_worker.adapters import AdapterConfig, write_adapter
from marlaas_worker.trainer.model import BaseModel


@pytest.fixture(scope="session")
def tiny_model():
    return prepare("tiny")


@pytest.fixture(scope="session")
def other_model(tmp_path_factory):
    """A smaller Llama than `tiny`, with random weights; its characters have other ids."""
    folder = tmp_path_factory.mktemp("other-model")
    save_tokenizer(folder, 512)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    characters = {token: at for token, at in VOCABULARY.items() if len(token) == 1}
    ids = [*characters.values()]
    tokenizer["model"]["vocab"] |= dict(zip(characters, ids[1:] + ids[:1], strict=True))
    path.write_text(json.dumps(tokenizer))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    ids = {"bos_token_id": None, "eos_token_id": VOCABULARY[END], "pad_token_id": VOCABULARY[PAD]}
    shape = {**sizes, **ids, "max_position_embeddings": 512, "initializer_range": 0.15}
    return save_random_llama(folder, len(VOCABULARY), **shape)


@pytest.fixture(scope="session")
def models(tiny_model, other_model):
    return {"tiny": tiny_model, "other": other_model}


@pytest.fixture(scope="session")
def judge(tiny_model, tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("judge"), torch.Generator().manual_seed(4)
    parameters = BaseModel(str(tiny_model)).attach(8, 16, ()).parameters
    tensors = {name: 0.05 * torch.randn(value.shape, generator=draw) for name, value in parameters.items()}
    for name, data in write_adapter(tensors, AdapterConfig(8, 16)).items():
        (folder / name).write_bytes(data)
    return folder


def _run(coroutine):
    """Run a coroutine on the event loop of the roles' processes."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


@pytest.fixture(scope="session")
def undisturbed(models, judge, tmp_path_factory):
    return _run(runs.undisturbed(models, tmp_path_factory.mktemp("undisturbed"), judge))


@pytest.fixture(scope="session")
def killed(models, judge, tmp_path_factory):
    return _run(runs.killed(models, tmp_path_factory.mktemp("killed"), judge))


@pytest.fixture(scope="session")
def crowd(tiny_model, tmp_path_factory):
    return _run(runs.crowd(tiny_model, tmp_path_factory.mktemp("crowd")))
