"""A process's surroundings where nobody made it a home: a container's read-only root, and a uid that no password file knows.

Libraries keep caches below the home folder (vLLM, triton, matplotlib, the hub's client) and ask for the user's name (torch's compiler). Where
there is a home, as on a person's machine, nothing is touched.
"""

import getpass
import os
import tempfile
from pathlib import Path

USER = "marlaas"


def make_home(scratch: Path) -> None:
    """Give this process a home below its scratch folder if it has none that it can write, and a name if it has none."""
    if not _has_home():
        home = scratch / "home"
        home.mkdir(parents=True, exist_ok=True)
        os.environ["HOME"] = str(home)
    if not _has_name():
        os.environ["USER"] = os.environ["LOGNAME"] = USER


def _has_home() -> bool:
    """Trying is the only proof: root may write where the disk is read-only for everybody."""
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
