"""Gateway to transformers: loads a base model."""

import threading
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from marlaas_api.errors import InvalidInput

_one_at_a_time = threading.Lock()


class ModelUnusable(InvalidInput):
    """The base model cannot be loaded, or computes something that the trainer cannot reproduce."""


def load_base_model(folder: Path, dtype: torch.dtype) -> Any:
    """Load transformers' causal language model on the CPU, without gradients and without dropout. Thread-safe.

    Raises:
        ModelUnusable: the folder is missing, or contains no model that transformers can load.
    """
    if not folder.is_dir():
        raise ModelUnusable(f"{folder} has no base model: expected a folder in Hugging Face format")
    disable_progress_bar()
    # transformers replaces methods of its classes, and torch's default dtype, while it loads a model. Two threads that do
    # so at once leave them replaced: no later model of the process would tie its head to its embeddings.
    with _one_at_a_time:
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ModelUnusable(f"the base model at {folder} cannot be loaded: {error}") from error
    return model.requires_grad_(False).eval()
