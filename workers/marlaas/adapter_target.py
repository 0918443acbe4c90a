"""Check the folder that an adapter is written to: an existing adapter may be replaced, other files may not."""

import os
from pathlib import Path

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def objection(target: Path) -> str | None:
    """Return the reason why an adapter cannot be written to `target`; None if it can.

    The reason is the end of a sentence that begins with the path.
    """
    if target.exists() and not target.is_dir():
        return "is no folder"
    if target.is_dir() and any(target.iterdir()) and not (target / CONFIG).is_file():
        return "holds something else than an adapter; name a new folder"
    there = next(folder for folder in target.absolute().parents if folder.exists())
    if not there.is_dir():
        return f"cannot be made: {there} is no folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"cannot be made: you may not write in {there}"
