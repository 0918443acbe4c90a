"""A process loads base models in several threads."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from marlaas_worker.base_model import load_base_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(made)
    return made


def test_models_that_are_loaded_at_once_are_complete_and_leave_transformers_as_it_was(folder):
    tie_weights, dtype = PreTrainedModel.tie_weights, torch.get_default_dtype()
    with ThreadPoolExecutor(8) as threads:
        models = list(threads.map(partial(load_base_model, folder), [torch.float32, torch.bfloat16] * 16))
    assert PreTrainedModel.tie_weights is tie_weights
    assert torch.get_default_dtype() is dtype
    for model in models:
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
