import importlib.util
import json

import pytest
from tests.models.model_folders import SHAPES, write_header, write_model
from tests.tables import rows

from marlaas.models import NotAModel, inspect, prepare
from marlaas.models.architectures import ADAPTABLE
from marlaas.models.lora_support import read_supported


def test_a_model_is_known_from_its_headers(tmp_path):
    facts = inspect(write_model(tmp_path / "m"))
    assert facts.architectures == ("LlamaForCausalLM",)
    assert facts.num_parameters == 2 * 100 * 8 + 2 * (64 + 256) + 8 + 8
    assert facts.linear_layers == {"down_proj": ((8, 32), (8, 32)), "q_proj": ((8, 8), (8, 8))}
    assert facts.max_positions == 512
    text = {"text_config": {"max_position_embeddings": 64}}  # as models with a picture side have it
    assert inspect(write_model(tmp_path / "pictures", max_position_embeddings=None, **text)).max_positions == 64
    heads = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}
    for given, cached in rows(__file__, "cached_values"):
        assert inspect(write_model(tmp_path / "cached", **heads, **given)).cached_values == cached
    assert facts.adapter_parameters(4) == 4 * 2 * (8 + 8) + 4 * 2 * (8 + 32)


def test_the_files_of_the_index_count_and_no_others(tmp_path):
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    names = sorted(SHAPES)
    for number, some in enumerate((names[:3], names[3:])):
        write_header(folder / f"part{number}.safetensors", {name: SHAPES[name] for name in some})
    write_header(folder / "consolidated.safetensors", {"layers.0.attention.wq.weight": (8, 8)})
    index = {"weight_map": {name: f"part{int(name in names[3:])}.safetensors" for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert inspect(folder) == inspect(write_model(tmp_path / "whole"))


def test_weights_in_another_format_are_not_served(tmp_path):
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(NotAModel, match="not in safetensors format"):
        inspect(folder)


def test_the_layers_are_those_that_manifests_are_checked_against_and_that_engine_and_trainer_adapt(tmp_path):
    """Of a mixture of experts neither adapts routers and experts, shared ones included."""
    from transformers import AfmoeConfig, AfmoeForCausalLM

    from marlaas_api.kinds.checks import LINEAR_LAYERS
    from marlaas_worker.rollout.vllm_settings import adaptable_layers
    from marlaas_worker.trainer.model import BaseModel

    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2, "num_dense_layers": 1}
    AfmoeForCausalLM(AfmoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2)).save_pretrained(tmp_path)
    mixture = BaseModel(str(tmp_path))
    assert not [name for name in mixture.layer_shapes() if "layers.1.mlp" in name]
    for folder, model in ((prepare("tiny"), BaseModel(str(prepare("tiny")))), (tmp_path, mixture)):
        facts = inspect(folder)
        assert set(facts.linear_layers) == set(LINEAR_LAYERS) == adaptable_layers(folder) == set(model.linear_layers)
        per_rank = sum(rows + columns for rows, columns, _ in model.layer_shapes().values())
        assert facts.adapter_parameters(1) == model.parameters_per_rank == per_rank
        assert bool(facts.num_expert_parameters) == (model is mixture)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm's sources (the extra cpu or gpu)")
def test_the_table_of_architectures_is_what_the_installed_vllm_adapts():
    assert sorted(ADAPTABLE) == read_supported(), "run: python -m marlaas.models.lora_support"
    assert {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"} <= ADAPTABLE
    assert not {"GPT2LMHeadModel", "BloomForCausalLM", "MambaForCausalLM", "BertModel"} & ADAPTABLE
