"""Named places between two effects where tests end the process, to prove that a crash there loses nothing.

`MARLAAS_FAILPOINT=<name>@<marker file>` kills this process with SIGKILL the first time it passes `<name>` while the marker does not
exist (the marker is created first, so the restarted process passes). In-process tests set `hook` instead.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

hook: Callable[[str], None] | None = None


def failpoint(name: str) -> None:
    """Pass a named place; `<role>.<action>.<after what>`, for example `trainer.commit.after_blobs`."""
    if hook is not None:
        hook(name)
    armed, _, marker = os.environ.get("MARLAAS_FAILPOINT", "").partition("@")
    if armed == name and marker:
        _kill_once(Path(marker))


def _kill_once(marker: Path) -> None:
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
