"""Damaged and unusual base models are refused by their files alone, with the file's name, before anything is started."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.models.model_folders import SHAPES

from marlaas.models import NotAModel, inspect

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100}
CONFIG |= {"num_hidden_layers": 2, "max_position_embeddings": 512}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"


@pytest.fixture
def folder(tmp_path):
    """A model of two layers with small random weights."""
    generator = np.random.default_rng(0)
    save_file({name: generator.normal(size=shape).astype("f4") for name, shape in SHAPES.items()}, tmp_path / WEIGHTS)
    configure(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def configure(folder, **config):
    (folder / "config.json").write_text(json.dumps(CONFIG | config))


def change_weights(folder, change):
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)


def split(folder, *, index=True, second=True, keep=9):
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(weights)
    parts = names[:4], names[4:keep]
    for shard, part in list(zip(SHARDS, parts, strict=True))[: 1 + second]:
        save_file({name: weights[name] for name in part}, folder / shard)
    if index:
        weight_map = {name: SHARDS[name not in parts[0]] for name in names}
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def truncate(folder):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-9])


def write_entry(folder):
    header = json.dumps({"x": {"dtype": "F32", "shape": [1]}}).encode()
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)


def fill(name, value):
    return lambda folder: change_weights(folder, lambda weights: weights[name].fill(value))


Q1 = "model.layers.1.self_attn.q_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda folder: (folder / WEIGHTS).write_bytes(b""), f"{WEIGHTS} is damaged"),
    "no header": (lambda folder: (folder / WEIGHTS).write_bytes(b"\xff" * 8), f"{WEIGHTS} is damaged"),
    "header": (lambda folder: (folder / WEIGHTS).write_bytes(b"\x02\0\0\0\0\0\0\0{x"), f"{WEIGHTS} is damaged"),
    "entry": (write_entry, "its header's entry 'x' is malformed"),
    "configuration": (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
    "list": (lambda folder: (folder / "config.json").write_text("[]"), "config.json is not a JSON object"),
    "truncated": (truncate, f"{WEIGHTS} has .* bytes, and its header says"),
    "pointer": (lambda folder: (folder / WEIGHTS).write_bytes(POINTER), f"{WEIGHTS} is a Git LFS pointer"),
    "tokenizer's pointer": (lambda folder: (folder / "tokenizer.json").write_bytes(POINTER), "tokenizer.json is a Git"),
    "tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json cannot be read"),
    "shard without index": (lambda folder: split(folder, index=False), f"{INDEX} is missing"),
    "missing shard": (lambda folder: split(folder, second=False), f"{SHARDS[1]} is missing"),
    "incomplete shard": (lambda folder: split(folder, keep=7), f"{SHARDS[1]} lacks model.norm.weight"),
    "index": (lambda folder: (folder / INDEX).write_text("{}"), f"{INDEX} has no weight_map"),
    "layer": (lambda folder: configure(folder, num_hidden_layers=3), "hold 2 of 3 layers .model.layers.2 is missing"),
    "matrix": (lambda folder: change_weights(folder, lambda weights: weights.pop(Q1)), f"lack {Q1}"),
    "vocabulary": (lambda folder: configure(folder, vocab_size=96), "has 100 rows in model.embed_tokens.weight"),
    "NaN": (fill(Q1, np.nan), f"{Q1} in {WEIGHTS} holds values that are not finite"),
    "infinite": (fill(Q1, np.inf), "not finite"),
    "zeros": (
        lambda folder: change_weights(folder, lambda weights: [one.fill(0) for one in weights.values()]),
        "hold only zeros",
    ),
    "quantised": (lambda folder: configure(folder, quantization_config={"quant_method": "gptq"}), "quantised .gptq"),
    "own code": (
        lambda folder: configure(folder, model_type="x", auto_map={"AutoConfig": "x.X"}),
        "code of the model's",
    ),
    "adapter": (lambda folder: (folder / "adapter_config.json").write_text("{}"), "adapter_config.json lies beside"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_model_is_refused_with_the_file_that_is_wrong(folder, name):
    damage, said = DAMAGES[name]
    damage(folder)
    with pytest.raises(NotAModel, match=said):
        inspect(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: None,
        split,
        lambda folder: configure(folder, auto_map={"AutoConfig": "x.X"}),
        fill("model.layers.0.mlp.down_proj.weight", 0.0),
        lambda folder: configure(folder, num_hidden_layers=1),
    ],
    ids=["whole", "shards", "own code of a known type", "one matrix of zeros", "a layer that predicts further tokens"],
)
def test_an_unusual_but_whole_model_is_accepted(folder, change):
    change(folder)
    assert inspect(folder).num_parameters == sum(np.prod(shape) for shape in SHAPES.values())


@pytest.mark.parametrize("setting", [{"block_configs": [{}, {}]}, {"use_cla": True}, {"num_kv_shared_layers": 1}])
def test_layers_may_differ_if_the_configuration_says_so(folder, setting):
    change_weights(folder, lambda weights: weights.pop(Q1))
    configure(folder, **setting)
    assert inspect(folder).num_layers == 2
