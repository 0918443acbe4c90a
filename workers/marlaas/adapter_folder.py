"""Folder of a PEFT adapter: the files that it must have, whether one may be written to a path, and writing it whole or not at all."""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from marlaas.local.folder import replace_folder, translated
from marlaas_api.errors import InvalidInput
from marlaas_api.failpoints import failpoint

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
CARD, CURVE, MARKER = "README.md", "curve.png", "marlaas.json"
"""Files that uploads add: the model card, the curve, and the file that names the version (`marlaas.uploads`)."""
_SUFFIXES = (".json", ".safetensors", ".md", ".png", ".jinja", ".model", ".txt")
"""Of the files of an adapter and its tokenizer."""
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
    if target.is_dir() and _has_others(target):
        return "holds files other than an adapter; choose a new folder"
    there = next(folder for folder in target.absolute().parents if folder.exists())
    if not there.is_dir():
        return f"cannot be created: {there} is not a folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"cannot be created: {there} is not writable"


def _has_others(folder: Path) -> bool:
    """Return whether a folder has something that replacing an adapter in it would lose."""
    entries = list(folder.iterdir())
    if any(not one.is_file() for one in entries) or (entries and not (folder / CONFIG).is_file()):
        return True
    try:
        own = own_files((folder / MARKER).read_bytes())
    except OSError:
        return any(one.suffix not in _SUFFIXES for one in entries)
    return not {one.name for one in entries} <= {*own, CARD, CURVE, MARKER}


def own_files(marker: bytes) -> frozenset[str]:
    """Return the names of an adapter's own files by the marker of its version; none if it cannot be read."""
    try:
        names = json.loads(marker)["sha256"].keys()
    except (ValueError, KeyError, TypeError, AttributeError):
        return frozenset()
    return frozenset(name for name in names if name and "/" not in name and name not in (CARD, CURVE, MARKER))


def write_adapter(files: Mapping[str, Path | bytes], target: Path) -> None:
    """Write a folder with these files, replacing an adapter that is there. The files are on the disk before the folder has its name.

    Raises:
        InvalidInput: the path cannot be written, or holds something else, which is left unchanged.
    """
    if (why := objection(target)) is not None:
        raise InvalidInput(f"{target} {why}")
    # Another name for each version: two jobs that write to one path would otherwise write into one folder.
    version = files.get(MARKER, b"")
    own = hashlib.sha256(version).hexdigest()[:16] if isinstance(version, bytes) and version else "partial"
    partial = target.with_name(f".{target.name}.{own}")
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
    _remove_leftovers(target)


def _remove_leftovers(target: Path) -> None:
    """Remove what writers of other versions have left that were killed before their folder had its name.

    A writer that is not dead finds its folder renamed, fails, and begins anew.
    """
    with contextlib.suppress(OSError):  # the adapter is written, even where its parent folder cannot be listed
        for one in target.parent.iterdir():
            if one.is_dir() and re.fullmatch(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}(\.left)?", one.name):
                left = one if one.suffix == ".left" else one.rename(one.with_name(f"{one.name}.left"))
                shutil.rmtree(left, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
