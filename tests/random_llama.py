"""A small Llama with random weights, the same in every run."""

from pathlib import Path
from typing import Any


def save_random_llama(folder: Path, vocabulary: int, **shape: Any) -> Path:
    """Save a Llama of two layers without a tokenizer; return the folder. shape: further arguments of its configuration."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=vocabulary, num_hidden_layers=2, **shape)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder
