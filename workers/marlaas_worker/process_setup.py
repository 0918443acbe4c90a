"""Setup of a worker's process before its first computation: MKL's settings, a home folder, a user name. Imports no torch.

MKL reads its settings once. By default it chooses the order of summation by the alignment of its operands, and the number of threads as it
goes (Intel, "Obtaining Numerically Reproducible Results"). An adapter read from a file lies anywhere in memory, so the same job could get
other last bits in another process.

A container with a read-only root has no writable home, and its uid no passwd entry. Libraries keep caches below the home folder (vLLM, triton,
matplotlib, the hub's client), and torch's compiler asks for the user's name. A writable home and an existing name are left unchanged.
"""

import getpass
import os
import tempfile
from pathlib import Path

SETTINGS = {"MKL_CBWR": "AUTO,STRICT", "MKL_DYNAMIC": "FALSE"}


def ask_for_the_same_bits() -> None:
    """Set the environment for this process and its children; keep values that the user has set."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


USER = "marlaas"


def make_home(scratch: Path) -> None:
    """Create a home below the scratch folder if the process has no writable one, and set a user name if it has none."""
    if not _has_home():
        home = scratch / "home"
        home.mkdir(parents=True, exist_ok=True)
        os.environ["HOME"] = str(home)
    if not _has_name():
        os.environ["USER"] = os.environ["LOGNAME"] = USER


def _has_home() -> bool:
    """Return whether a file can be written below the home folder.

    Permissions are not enough: root passes every permission check but cannot write on a read-only file system.
    """
    try:
        with tempfile.TemporaryFile(dir=Path.home()):
            return True
    except (OSError, RuntimeError):
        return False


def _has_name() -> bool:
    try:
        return bool(getpass.getuser())
    except (KeyError, OSError):
        return False
