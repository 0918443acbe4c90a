"""Servers as child processes: never outliving the test, and their last words in the error."""

import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path


class NotReady(Exception):
    """A server did not become ready in time, or ended; the message carries the end of its log."""


class Daemon:
    """One server process that can be killed and started again with the same command.

    The kernel kills it when the *thread* that started it ends (PDEATHSIG): start it from a thread that lives as long
    as it should.
    """

    def __init__(self, name: str, command: Sequence[str | Path], log: Path) -> None:
        self.name = name
        self.command = [str(part) for part in command]
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id; raises NotReady if it is not running."""
        if not self.alive or self._process is None:
            raise NotReady(f"{self.name} is not running")
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        with self.log.open("ab") as log:
            command = ["setpriv", "--pdeathsig", "KILL", "--", *self.command]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Nothing if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)

    def wait(self, timeout_s: float) -> int:
        """Its exit code once it has ended by itself. Raises NotReady if it was never started or still runs."""
        if self._process is None:
            raise NotReady(f"{self.name} was never started")
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise NotReady(f"{self.name} still runs after {timeout_s:.0f} s") from error

    def wait_ready(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Poll `ready` until it is true. Raises NotReady with the log's end when the process ends or time is up."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if not self.alive:
                raise NotReady(f"{self.name} ended at its start:\n{self.last_words()}")
            if time.monotonic() > deadline:
                raise NotReady(f"{self.name} is not ready after {timeout_s:.0f} s:\n{self.last_words()}")
            time.sleep(0.05)

    def last_words(self, num_lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:]) if self.log.exists() else ""


def free_ports(num: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now, all different."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]
    ports = [int(listener.getsockname()[1]) for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports
