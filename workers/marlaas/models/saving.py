"""Save models in Hugging Face format, as the engine and the trainer read it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def save_weights(model: PreTrainedModel, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors."""
    with quiet():
        model.save_pretrained(folder, max_shard_size="100GB")


@contextmanager
def quiet() -> Iterator[None]:
    """Disable transformers' progress bars; MARLaaS shows its own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
