"""What the trainers' tests share: a tiny random model, what samples from it, and a world around trainers."""

import asyncio

import pytest
import torch
from tests.random_llama import save_random_llama
from tests.trainer.harness import VOCABULARY, Sampler, TrainerHarness

from marlaas_api import failpoints
from marlaas_worker.trainer.model import BaseModel
from tests import virtual_time

event_loop_policy = virtual_time.event_loop_policy


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape = {**sizes, "max_position_embeddings": 256, "initializer_range": 0.2}
    return save_random_llama(tmp_path_factory.mktemp("tiny-llama"), VOCABULARY, **shape)


@pytest.fixture
def base(tiny_model):
    return BaseModel(str(tiny_model))


@pytest.fixture(scope="session")
def sampler(tiny_model):
    return Sampler(tiny_model)


@pytest.fixture(autouse=True)
def _one_thread_and_no_failpoint():
    torch.set_num_threads(1)
    yield
    failpoints.hook = None


@pytest.fixture
async def harness(tiny_model, tmp_path, sampler):
    made = TrainerHarness(tiny_model, tmp_path, sampler)
    await made.bus.ensure()
    return made


@pytest.fixture(scope="session")
def apart(tiny_model, tmp_path_factory, sampler):
    async def run(play):
        harness = TrainerHarness(tiny_model, tmp_path_factory.mktemp("apart"), sampler)
        await harness.bus.ensure()
        return await play(harness)

    def alone(play):
        with asyncio.Runner(loop_factory=virtual_time.VirtualLoop) as runner:
            return runner.run(run(play))

    return alone
