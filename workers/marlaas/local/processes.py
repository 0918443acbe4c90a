"""Role processes: start, stop, and clean up after them. Makes no decisions."""

import asyncio
import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from marlaas.envs import own_modules
from marlaas.local.credentials import CredentialSource, Handed
from marlaas.local.folder import OutFolder, translated, write
from marlaas.local.modules import environments_of
from marlaas.local.plan import ProcessSpec, cards_by_worker
from marlaas.local.sandbox_host import HostCommand, HostedSandbox, SandboxHost, sandbox_host
from marlaas.local.watchdog import clean_up, kill_session
from marlaas_api.bus_users import BusUser, OrchestratorUser, RolloutUser, SandboxUser, TrainerUser
from marlaas_api.cpu_shares import COMPUTE_SHARE, set_share_soon
from marlaas_api.errors import InvalidInput
from marlaas_api.last_words import START_MARK
from marlaas_api.messages import JobDocument, PoolDocument

ROLE_COMMAND = (sys.executable, "-P", "-m", "marlaas_worker")
"""-P keeps the current folder off the import path of roles."""
TAIL_BYTES = 256 << 10

_OF_OTHERS = re.compile(
    r"PYTHON(?!(PATH|HOME|PYCACHEPREFIX|DONTWRITEBYTECODE|NOUSERSITE|UTF8|IOENCODING)$).*"  # PYTHONWARNINGS=error ends vLLM
    r"|VLLM_(PORT|HOST_IP|DP_.*)|MASTER_(ADDR|PORT)|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|TORCHELASTIC_.*"  # of a distributed program
)
RoleProcess = asyncio.subprocess.Process | HostedSandbox


MAX_FOLDER_BYTES = 64
"""Longest path of the folder for temporary files: a socket's path has at most 107 bytes, and vLLM's names take 37 of them."""
SHORT_FOLDERS = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))


class Watchdog:
    """Client of the process `marlaas.local.watchdog`. `temporary` is a folder that is deleted when the run ends."""

    def __init__(self, process: asyncio.subprocess.Process, temporary: Path) -> None:
        self._process = process
        self.temporary = temporary
        self.sessions: set[int] = set()

    def add(self, session: int) -> None:
        """Register a session that must end with the runner."""
        self.sessions.add(session)
        self._say(f"+{session}\n")

    def remove(self, session: int) -> None:
        """Unregister a session that has ended."""
        self.sessions.discard(session)
        self._say(f"-{session}\n")

    def _say(self, line: str) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(ConnectionError):
                self._process.stdin.write(line.encode())


def own_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the shell's variables for a role, without those that were set for another program and would change or end a role."""
    return {name: value for name, value in variables.items() if not _OF_OTHERS.fullmatch(name)}


VISIBLE_CARDS = "CUDA_VISIBLE_DEVICES"


def visible_cards(variables: Mapping[str, str], dev: Path = Path("/dev")) -> list[str]:
    """Return the NVIDIA GPUs that processes of the user see: those that the user's variable names, or all."""
    given = variables.get(VISIBLE_CARDS)
    if given is not None:
        return [card.strip() for card in given.split(",") if card.strip()]
    numbers = (path.name.removeprefix("nvidia") for path in dev.glob("nvidia*"))
    return sorted((number for number in numbers if number.isdigit()), key=int)


def short_folder() -> Path:
    """Make a folder for temporary files in TMPDIR; a link to it if its path is too long for sockets, as batch systems set it.

    Raises:
        InvalidInput: there is no place for the link.
    """
    made = Path(tempfile.mkdtemp(prefix="marlaas-"))
    if len(os.fsencode(made)) <= MAX_FOLDER_BYTES:
        return made
    for place in SHORT_FOLDERS:
        link = place / made.name
        with contextlib.suppress(OSError):
            link.symlink_to(made)
            return link
    made.rmdir()
    raise InvalidInput(
        f"TMPDIR is {made.parent}: with {len(os.fsencode(made))} bytes, its path is too long for the engine's sockets "
        f"(at most {MAX_FOLDER_BYTES}), and no link can be made in {SHORT_FOLDERS[0]}; set TMPDIR to a folder with a shorter path"
    )


@contextlib.asynccontextmanager
async def watchdog() -> AsyncIterator[Watchdog]:
    """Start the watchdog. Leaving the context stops it, and the sessions that are still registered.

    Raises:
        InvalidInput: the path of the folder for temporary files is too long for sockets.
    """
    temporary = short_folder()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "marlaas.local.watchdog",
        str(temporary),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    guard = Watchdog(process, temporary)
    try:
        yield guard
    finally:
        if process.stdin is not None:
            process.stdin.close()
        if await process.wait() != 0:  # It was killed, so clean up here.
            await asyncio.to_thread(clean_up, guard.sessions, temporary)


@dataclass(frozen=True, slots=True)
class Launcher:
    """Starts roles.

    command: command line of a role; the role's name follows. jobs: by key; pools: by name.
    modules: by key of a job, the folder of its manifest, in which its sandbox searches modules first. host: serves sandboxes
    (`with_host`); None: every role is a process of its own.
    """

    folder: OutFolder
    nats_url: str
    credentials: CredentialSource
    watchdog: Watchdog
    pools: Mapping[str, PoolDocument]
    jobs: dict[str, JobDocument]
    modules: dict[str, Path] = field(default_factory=dict)
    command: tuple[str, ...] = ROLE_COMMAND
    host: SandboxHost | None = None

    def add(self, job: JobDocument, modules: Path | None) -> None:
        """Add a job with the folder of its manifest, or a newer document of a job, whose folder stays."""
        known = self.jobs.get(job.ref.key)
        if modules is not None and (known is None or known.uid != job.uid):
            self.modules[job.ref.key] = modules
        self.jobs[job.ref.key] = job

    @contextlib.asynccontextmanager
    async def with_host(self) -> "AsyncIterator[Launcher]":
        """Yield a launcher that serves all sandboxes in one process, which ends with the context. A role command of a test knows none."""
        if self.command != ROLE_COMMAND:
            yield self
            return
        # -s: episodes of earlier sandboxes could write below HOME.
        command = HostCommand(
            (*ROLE_COMMAND[:1], "-s", *ROLE_COMMAND[1:]), self._environment(), self.folder.logs / "sandboxes.log"
        )
        async with sandbox_host(command, self.watchdog) as host:
            yield replace(self, host=host)

    async def start(self, spec: ProcessSpec) -> RoleProcess:
        """Start a role in its own session, writing to its log; trainers with a smaller CPU share. Raises InvalidInput if the folder cannot be written."""
        path = self.log(spec)
        with translated(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            log = path.open("ab", buffering=0)
        with log:
            log.write(f"{START_MARK} {spec} {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n".encode())
            handed = self.credentials.of(self.user(spec))
            arguments = [spec.role, *self._arguments(spec, handed)]
            if spec.role == "sandbox" and self.host is not None:
                return await self.host.start(arguments, log, handed.descriptors)
            process = await asyncio.create_subprocess_exec(
                *self.command,
                *arguments,
                pass_fds=handed.descriptors,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment() | self._card(spec),
                start_new_session=True,
            )
        self.watchdog.add(process.pid)
        if spec.role == "trainer":
            await set_share_soon(process.pid, COMPUTE_SHARE)
        return process

    def user(self, spec: ProcessSpec) -> BusUser:
        """Return the bus user of the role."""
        match spec.role:
            case "rollout":
                return RolloutUser(spec.pool)
            case "trainer":
                return TrainerUser(spec.pool)
            case "sandbox":
                ref = self.jobs[spec.job].ref
                return SandboxUser(ref.namespace, ref.name, ref.uid)
            case _:
                return OrchestratorUser()

    def log(self, spec: ProcessSpec) -> Path:
        """Return the path of the role's log."""
        if spec.job:
            return self.folder.job(self.jobs[spec.job].ref) / "logs" / f"{spec.name}.log"
        return self.folder.logs / f"{spec.key}.log"

    def log_tail(self, spec: ProcessSpec) -> str:
        """Return the end of the log."""
        with self.log(spec).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read().decode(errors="replace")

    def _card(self, spec: ProcessSpec) -> dict[str, str]:
        """Return the variable that shows a worker its own GPU only, on a machine with several."""
        card = cards_by_worker(list(self.pools.values()), visible_cards(os.environ)).get(spec.key)
        return {} if card is None else {VISIBLE_CARDS: card}

    def _environment(self) -> dict[str, str]:
        added = {
            "MARLAAS_PARENT_PID": str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self.watchdog.temporary),
        }
        return {**own_variables(os.environ), **added}

    def _arguments(self, spec: ProcessSpec, handed: Handed) -> list[str]:
        scratch = self.folder.scratch / spec.key
        arguments = [
            "--nats",
            self.nats_url,
            "--blobs",
            str(self.folder.blobs),
            "--name",
            spec.name,
            "--scratch",
            str(scratch),
            *(["--creds", str(handed.path)] if handed.path is not None else []),
            *(["--share-cpu"] if spec.role == "rollout" else []),
            *self._modules(spec),
        ]
        document = self.jobs.get(spec.job) or self.pools.get(spec.pool)
        if document is None:
            return arguments
        flag = "--job-file" if spec.job else "--pool-file"
        path = self.folder.documents / f"{flag[2:-5]}.{spec.job or spec.pool}.json"
        write(path, document.model_dump_json(indent=1).encode())
        return [*arguments, flag, str(path)]

    def _modules(self, spec: ProcessSpec) -> list[str]:
        """Return the arguments by which a sandbox finds an environment of the user's own beside the job's manifest."""
        folder = self.modules.get(spec.job)
        if folder is None:
            return []
        environments = environments_of(self.jobs[spec.job].spec)
        has_own = any(own_modules(name, args) for _, name, args in environments)
        return ["--modules", str(folder)] if has_own else []

    async def sweep(self, process: RoleProcess) -> int:
        """Wait until a role exits, kill its remaining children, and return its exit code."""
        exit_code = await process.wait()
        if not isinstance(process, HostedSandbox):
            await asyncio.to_thread(kill_session, process.pid)
            self.watchdog.remove(process.pid)
        return exit_code

    def kill_sandboxes(self) -> None:
        """Kill the process of all sandboxes, if there is one."""
        if self.host is not None:
            self.host.kill()


def ask_to_end(process: RoleProcess) -> None:
    """Ask the role to drain."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()


def kill(process: RoleProcess) -> None:
    """Kill the role and its children."""
    if isinstance(process, HostedSandbox):
        process.kill()
    else:
        kill_session(process.pid)
