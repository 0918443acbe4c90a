import importlib.util

import pytest

from marlaas.models.architectures import ADAPTABLE
from marlaas.models.lora_support import read_supported


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm's sources (the extra cpu or gpu)")
def test_the_table_is_what_the_installed_vllm_adapts() -> None:
    assert sorted(ADAPTABLE) == read_supported(), "run: python -m marlaas.models.lora_support"


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"])
def test_well_known_architectures_are_adapted(name: str) -> None:
    assert name in ADAPTABLE


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BloomForCausalLM", "MambaForCausalLM", "BertModel"])
def test_those_without_adapters_in_vllm_are_not(name: str) -> None:
    assert name not in ADAPTABLE
