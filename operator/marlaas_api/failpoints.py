"""Named points between two effects where tests kill the process, to prove that a crash there loses nothing.

`MARLAAS_FAILPOINT=<name>@<marker file>` kills the process with SIGKILL the first time that it reaches `<name>` and the
marker does not exist. The marker is created first, so that the restarted process continues. In-process tests set `hook`
instead.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

hook: Callable[[str], None] | None = None


def failpoint(name: str) -> None:
    """Reach a failpoint. name: `<role>.<action>.<after what>`, for example `trainer.commit.after_blobs`."""
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
