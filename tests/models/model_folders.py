"""Model folders for tests: right in every byte that is read, with no weights behind the headers."""

import json

SHAPES = {
    "model.embed_tokens.weight": (100, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.q_proj.bias": (8,),
    "model.layers.0.mlp.down_proj.weight": (8, 32),
    "model.layers.1.self_attn.q_proj.weight": (8, 8),
    "model.layers.1.mlp.down_proj.weight": (8, 32),
    "model.norm.weight": (8,),
    "lm_head.weight": (100, 8),
}
CONFIG = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512}


def write_header(file, shapes):
    """A safetensors file that ends after its header."""
    entries = {name: {"dtype": "BF16", "shape": list(shape), "data_offsets": [0, 0]} for name, shape in shapes.items()}
    header = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)


def write_model(folder, shapes=SHAPES, **config):
    """A folder that `marlaas.models.inspect` takes for a model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "tokenizer.json").write_text("{}")
    write_header(folder / "model.safetensors", shapes)
    return folder
