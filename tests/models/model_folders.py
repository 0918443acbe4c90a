"""Model folders for tests: right in every byte that is read, with no weights behind the headers."""

import json

from tests.tables import data

SHAPES = {name: tuple(shape) for name, shape in data(__file__, "shapes").items()}
CONFIG = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512}


def write_header(file, shapes):
    """A safetensors file that ends after its header."""
    entries = {name: {"dtype": "BF16", "shape": list(shape), "data_offsets": [0, 0]} for name, shape in shapes.items()}
    header = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)


def write_adapter(folder, config):
    """An adapter with this configuration, and no tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.safetensors").touch()
    return folder


def write_model(folder, shapes=SHAPES, **config):
    """A folder that `marlaas.models.inspect` takes for a model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "tokenizer.json").write_text("{}")
    write_header(folder / "model.safetensors", shapes)
    return folder
