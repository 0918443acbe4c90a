"""Folder of a PEFT adapter: the files that it must have, whether one may be written to a path, and writing it whole or not at all."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from marlaas.local.folder import replace_folder, translated
from marlaas_api.errors import InvalidInput
from marlaas_api.failpoints import failpoint

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MARKER = "marlaas.json"
"""File beside an uploaded adapter that names its version (`marlaas.uploads`)."""
Files = dict[str, Path | bytes]
"""Files of a folder or repository by name: where they lie, or what they hold."""


def plain_files(adapter: Path) -> Files:
    """Return the files of an adapter's folder by name, without the marker of an upload from which it may come."""
    return {one.name: one for one in sorted(adapter.iterdir()) if one.is_file() and one.name != MARKER}


def objection(target: Path) -> str | None:
    """Return the reason why an adapter cannot be written to `target`; None if it can.

    The reason is the end of a sentence that begins with the path.
    """
    if target.exists() and not target.is_dir():
        return "is not a folder"
    if target.is_dir() and any(target.iterdir()) and not (target / CONFIG).is_file():
        return "holds files other than an adapter; choose a new folder"
    there = next(folder for folder in target.absolute().parents if folder.exists())
    if not there.is_dir():
        return f"cannot be created: {there} is not a folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"cannot be created: {there} is not writable"


def write_adapter(files: Mapping[str, Path | bytes], target: Path) -> None:
    """Write a folder with these files, replacing an adapter that is there. The files are on the disk before the folder has its name.

    Raises:
        InvalidInput: the path cannot be written, or holds something else, which is left unchanged.
    """
    if (why := objection(target)) is not None:
        raise InvalidInput(f"{target} {why}")
    partial = target.with_name(f".{target.name}.partial")
    with translated(target):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, content in files.items():
            if isinstance(content, bytes):
                (partial / name).write_bytes(content)
            else:
                shutil.copyfile(content, partial / name)
            _sync(partial / name)
        _sync(partial)
    failpoint("exporter.upload.before_rename")
    replace_folder(partial, target)
    with translated(target):
        _sync(target.parent)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
