"""The files of adapters, and of base models that several threads load."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load, save
from tests.tables import rows
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from marlaas_worker import adapters
from marlaas_worker.adapters import write_tensors
from marlaas_worker.base_model import load_base_model
from marlaas_worker.peft_config import other_base, unsupported_fields

MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj")
CONFIG = adapters.AdapterConfig(rank=4, alpha=8, base_model="team/tiny", revision="9f2c")


def random_tensors():
    draw = torch.Generator().manual_seed(0)
    shapes = {"A": (4, 6), "B": (5, 4)}
    return {
        adapters.tensor_name(module, kind): torch.randn(shape, generator=draw)
        for module in MODULES
        for kind, shape in shapes.items()
    }


def test_what_is_written_is_read_back_bit_for_bit_and_does_not_depend_on_the_order(tmp_path):
    tensors = random_tensors()
    for name, data in adapters.write_adapter(tensors, CONFIG).items():
        (tmp_path / name).write_bytes(data)
    read, config = adapters.read_adapter(tmp_path)
    assert config == CONFIG
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    tensors = random_tensors()
    backwards = dict(reversed(tensors.items()))
    assert adapters.write_adapter(tensors, CONFIG) == adapters.write_adapter(backwards, CONFIG)
    assert adapters.tensor_digests(tensors, 2.0) == adapters.tensor_digests(backwards, 2.0)


def test_peft_reads_the_config(tmp_path):
    written = adapters.write_adapter(random_tensors(), CONFIG)[adapters.CONFIG_FILE]
    (tmp_path / adapters.CONFIG_FILE).write_bytes(written)
    config = LoraConfig.from_pretrained(str(tmp_path))
    assert (config.r, config.lora_alpha, set(config.target_modules)) == (4, 8, {"q_proj", "down_proj"})
    assert (config.bias, config.task_type) == ("none", "CAUSAL_LM")
    assert (config.base_model_name_or_path, config.revision) == ("team/tiny", "9f2c")


@pytest.mark.parametrize("scaling", [1.0, 1.5])
def test_a_digest_is_of_a_cast_and_of_b_cast_then_scaled(scaling):
    tensors = random_tensors()
    tensors[adapters.tensor_name(MODULES[0], "A")] *= 1e-12  # zero in 16 bits
    tensors[adapters.tensor_name(MODULES[0], "B")].zero_().neg_()
    tensors[adapters.tensor_name(MODULES[1], "B")] = tensors[adapters.tensor_name(MODULES[1], "B")].bfloat16()
    for dtype, digest in adapters.tensor_digests(tensors, scaling).items():
        held = []
        for module in MODULES:
            a, b = (tensors[adapters.tensor_name(module, kind)].clone().to(getattr(torch, dtype)) for kind in "AB")
            b *= scaling
            held += [(module, "A", a), (module, "B", b)]
        assert digest == adapters.slot_digest(held) == adapters.tensor_digest(tensors, scaling, dtype)


def test_a_digest_differs_with_any_bit_name_or_scaling_and_not_with_a_module_of_zeros():
    tensors = random_tensors()
    nudged = {name: tensor.clone() for name, tensor in tensors.items()}
    first = nudged[adapters.tensor_name(MODULES[0], "B")]
    first[0, 0] = torch.nextafter(first[0, 0], torch.tensor(10.0))
    renamed = {name.replace("layers.1", "layers.2"): tensor for name, tensor in tensors.items()}
    found = {adapters.tensor_digest(one, 2.0, "float32") for one in (tensors, nudged, renamed)}
    found |= {adapters.tensor_digest(tensors, 1.0, "float32"), *adapters.tensor_digests(tensors, 2.0).values()}
    assert len(found) == 6
    tensors = random_tensors()
    without = {name: tensor for name, tensor in tensors.items() if MODULES[1] not in name}
    zeroed = {name: tensor if name in without else torch.zeros_like(tensor) for name, tensor in tensors.items()}
    assert adapters.tensor_digest(zeroed, 2.0, "bfloat16") == adapters.tensor_digest(without, 2.0, "bfloat16")


def test_an_adapter_has_an_effect_only_if_some_b_is_not_zero_and_its_sum_may_overflow():
    tensors = random_tensors()
    zero = {name: tensor if ".lora_A." in name else torch.zeros_like(tensor) for name, tensor in tensors.items()}
    assert (adapters.has_effect(tensors), adapters.has_effect(zero)) == (True, False)
    adapters.check_adapter({name: torch.full_like(value, 3e38) for name, value in tensors.items()}, CONFIG)


FIRST = adapters.tensor_name(MODULES[0], "A")


@pytest.mark.parametrize(
    ("change", "rank", "words"),
    [
        (lambda tensors: tensors.pop(FIRST), 4, "has lora_B only"),
        (lambda tensors: None, 8, "does not fit rank 8"),
        (lambda tensors: tensors[FIRST].fill_(float("nan")), 4, "not finite"),
        (lambda tensors: tensors.update({"model.embed.weight": torch.zeros(2, 2)}), 4, "not a LoRA matrix"),
        (lambda tensors: tensors.clear(), 4, "without tensors"),
    ],
)
def test_what_is_no_adapter_is_refused_by_name(change, rank, words):
    change(tensors := random_tensors())
    with pytest.raises(adapters.AdapterInvalid, match=words):
        adapters.write_adapter(tensors, adapters.AdapterConfig(rank=rank, alpha=8))


def test_damaged_or_missing_files_and_other_kinds_of_adapter_are_refused(tmp_path):
    files = adapters.write_adapter(random_tensors(), CONFIG)
    fields = json.loads(files[adapters.CONFIG_FILE])
    unnamed = json.dumps({**fields, "target_modules": ["q_proj"]}).encode()
    for broken, words in (
        ({**files, adapters.TENSORS_FILE: files[adapters.TENSORS_FILE][:-3]}, "damaged"),
        ({**files, adapters.CONFIG_FILE: b"{"}, "cannot be read"),
        ({**files, adapters.CONFIG_FILE: b"[]"}, "holds no mapping"),
        ({**files, adapters.CONFIG_FILE: unnamed}, r"down_proj\.lora_[AB]\.weight', which target_modules"),
        ({adapters.CONFIG_FILE: files[adapters.CONFIG_FILE]}, "no adapter_model.safetensors"),
    ):
        with pytest.raises(adapters.AdapterInvalid, match=words):
            adapters.read_adapter(broken)
    with pytest.raises(adapters.AdapterInvalid, match=r"no adapter_config\.json"):
        adapters.read_adapter(tmp_path)


def test_every_field_of_peft_is_accepted_as_it_is_by_default_and_each_other_value_is_refused_by_name():
    made = json.loads(json.dumps(LoraConfig(task_type="CAUSAL_LM").to_dict(), default=list))
    assert list(unsupported_fields(made)) == []
    for name, value in rows(__file__, "unsupported"):
        (said,) = unsupported_fields({**made, name: value})
        assert said.startswith(f"{name} is {value!r}: ")


@pytest.mark.parametrize(("named", "base", "differs"), rows(__file__, "bases"))
def test_an_adapter_of_another_base_model_is_told_from_one_that_has_its_name_in_another_form(named, base, differs):
    assert (other_base(*named, *base) is not None) == differs


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)


def tensors():
    draw = torch.Generator().manual_seed(1)
    shapes = {"b.x": (3, 4), "a": (5,), "layers.10.w": (1, 1), "layers.2.w": (0, 7), "umläut": (2, 3)}
    return {
        f"{name}/{dtype}": (100 * torch.rand(shape, generator=draw)).to(dtype)
        for dtype in reversed(DTYPES)
        for name, shape in shapes.items()
    }


def test_the_bytes_are_those_of_the_library_also_of_parts_of_a_buffer():
    made = tensors()
    for metadata in (None, {"format": "pt"}):
        assert write_tensors(made, metadata) == save(made, metadata=metadata)
        assert write_tensors(dict(reversed(made.items())), metadata) == save(made, metadata=metadata)
    flat = torch.arange(12.0)
    made = {"left": flat[:6].view(2, 3), "right": flat[6:].view(3, 2).T}
    found = load(write_tensors(made))
    assert all(torch.equal(found[name], value) for name, value in made.items())


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
