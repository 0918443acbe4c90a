"""Damaged and unusual base models are refused by their files alone, with the file's name, before anything is started."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.models.model_folders import SHAPES
from tests.tables import rows

from marlaas.models import NotAModel, inspect

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100}
CONFIG |= {"num_hidden_layers": 2, "max_position_embeddings": 512}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


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


def write(folder, file, content):
    (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())


def truncate(folder):
    write(folder, WEIGHTS, (folder / WEIGHTS).read_bytes()[:-9])


def fill(folder, name, value):
    change_weights(folder, lambda weights: [weights[each].fill(value) for each in weights if each in (name or each)])


def remove(folder, name):
    change_weights(folder, lambda weights: weights.pop(name))


ACTS = {act.__name__: act for act in (write, configure, split, truncate, fill, remove)}


@pytest.mark.parametrize(("damage", "given", "said"), rows(__file__, "damages"))
def test_a_damaged_model_is_refused_with_the_file_that_is_wrong(folder, damage, given, said):
    ACTS[damage](folder, **given)
    with pytest.raises(NotAModel, match=said):
        inspect(folder)


@pytest.mark.parametrize(("change", "given"), rows(__file__, "unusual"))
def test_an_unusual_but_whole_model_is_accepted(folder, change, given):
    ACTS[change](folder, **given)
    assert inspect(folder).num_parameters == sum(np.prod(shape) for shape in SHAPES.values())


@pytest.mark.parametrize("setting", [{"block_configs": [{}, {}]}, {"use_cla": True}, {"num_kv_shared_layers": 1}])
def test_layers_may_differ_if_the_configuration_says_so(folder, setting):
    remove(folder, "model.layers.1.self_attn.q_proj.weight")
    configure(folder, **setting)
    assert inspect(folder).num_layers == 2
