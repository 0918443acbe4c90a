"""Running kubectl and helm as child processes."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from marlaas_e2e import binaries


class CommandFailed(Exception):
    """A command ended with another status than 0; `stderr` is what it said."""

    def __init__(self, command: Sequence[str], done: subprocess.CompletedProcess[str]) -> None:
        super().__init__(f"{' '.join(command)}: status {done.returncode}\n{done.stderr}{done.stdout}")
        self.returncode = done.returncode
        self.stdout = done.stdout
        self.stderr = done.stderr


def run(command: Sequence[str | Path], stdin: str | None = None, timeout_s: float = 600) -> str:
    """Standard output of a command; raises CommandFailed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=timeout_s, env=_environment())
    if done.returncode != 0:
        raise CommandFailed(words, done)
    return done.stdout


def run_kubectl(kubeconfig: Path, arguments: Sequence[str | Path], stdin: str | None = None) -> str:
    """Standard output of kubectl with this kubeconfig; raises CommandFailed."""
    return run([binaries.ensure(["kubectl"])["kubectl"], "--kubeconfig", kubeconfig, *arguments], stdin)


def _environment() -> dict[str, str]:
    left_out = {"KUBECONFIG", "HTTPS_PROXY", "https_proxy"}
    return {name: value for name, value in os.environ.items() if name not in left_out}
