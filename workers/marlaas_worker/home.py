"""Home folder and user name for a process without them: a container with a read-only root, and a uid without a passwd entry.

Libraries keep caches below the home folder (vLLM, triton, matplotlib, the hub's client), and torch's compiler
asks for the user's name. A writable home and an existing user name, as on a workstation, are left unchanged.
"""

import getpass
import os
import tempfile
from pathlib import Path

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
