"""The folder of a trained adapter opens alone in PEFT and transformers."""

import json

from tests.harness import pool_document

from marlaas.local.adapter import complete
from marlaas.models import prepare
from marlaas_worker.adapters import AdapterConfig, tensor_name, write_adapter


def test_peft_and_transformers_open_the_folder_of_an_adapter_alone(tmp_path):
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    tiny = prepare("tiny")
    config = json.loads((tiny / "config.json").read_text())
    size, tensors = config["hidden_size"], {}
    for layer in range(config["num_hidden_layers"]):
        module = f"model.layers.{layer}.self_attn.q_proj"
        tensors |= {tensor_name(module, "A"): torch.ones(2, size), tensor_name(module, "B"): torch.ones(size, 2)}
    for name, data in write_adapter(tensors, AdapterConfig(2, 4, "tiny")).items():
        (tmp_path / name).write_bytes(data)
    complete(tmp_path, pool_document(tiny))
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path)
    loaded = [value for name, value in model.named_parameters() if "lora_B" in name]
    assert [value.sum().item() for value in loaded] == [2.0 * size] * config["num_hidden_layers"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer("abc")["input_ids"]) == "abc"


def test_a_model_of_the_hub_is_named_with_its_revision(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    pool = pool_document(tmp_path / "cache")
    hub = {"hub": {"id": "Qwen/Qwen3-0.6B", "revision": "0" * 40}}
    complete(
        tmp_path, pool.model_copy(update={"spec": pool.spec.model_copy(update={"model": type(pool.spec.model)(**hub)})})
    )
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config == {"r": 8, "base_model_name_or_path": "Qwen/Qwen3-0.6B", "revision": "0" * 40}
