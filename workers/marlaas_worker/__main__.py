"""`python -m marlaas_worker ROLE …`: run one role as a process, from its arguments to its exit code.

Exit codes: 0 drained; 1 crashed (the log ends with the traceback; restart it); 2 invalid input that a person
must correct (`InvalidInput`).
"""

import argparse
import asyncio
import contextlib
import contextvars
import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import IO

import uvloop

from marlaas_api.background import stop_on_signals
from marlaas_api.blobs_store import open_blobs
from marlaas_api.bus_nats import connect
from marlaas_api.errors import InvalidInput, MarlaasError, first_cause
from marlaas_api.messages import JobDocument, PoolDocument
from marlaas_api.prctl import die_with_parent
from marlaas_worker.metrics import Metrics
from marlaas_worker.process_setup import (
    ask_for_the_same_bits,
    collect_once_ready,
    drop_read_only_caches,
    make_home,
    set_memory_variables,
)
from marlaas_worker.role import RoleContext


class OneRecordFormatter(logging.Formatter):
    """Formats a record as `<UTC time> <LEVEL> <name> <logger>: <text>`; further lines, such as a traceback, are indented.

    name: the replica's.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03dZ %(levelname)s {name} %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", "\n    ")


_of_sandbox = contextvars.ContextVar[logging.Handler | None]("of_sandbox", default=None)
"""Log handler of the sandbox that the current task belongs to, if several sandboxes share this process; else None."""


class _LogHandler(logging.StreamHandler[IO[str]]):
    """Writes a record to the log of the sandbox whose task made it, where several sandboxes share this process; every other record to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        if (own := _of_sandbox.get()) is not None:
            own.emit(record)
        else:
            super().emit(record)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one role until it is asked to stop; return the exit code. arguments: of the command; None: those of this process."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:2] == ["sandbox", "--host"]:
        return _host_sandboxes(int(arguments[2]))
    options = _parser().parse_args(arguments)
    _set_up_logging(options.name)
    _die_with_parent()
    make_home(options.scratch)
    drop_read_only_caches()
    ask_for_the_same_bits()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(options))


def _host_sandboxes(control: int) -> int:
    """Serve all sandboxes of a local run in this process; return the exit code.

    control: file descriptor of the socket with the requests to start and stop sandboxes (`sandbox.host`).
    """
    from marlaas_worker.sandbox.host import serve

    _set_up_logging("sandboxes")
    _die_with_parent()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(control, _run_in_host))
    return 0


async def _run_in_host(arguments: Sequence[str], log: IO[str], stop: asyncio.Event) -> int:
    """Run one sandbox of many in this process; return the exit code that it would have as a process.

    Args:
        arguments: as of the command.
        log: the sandbox's own log.
        stop: set to ask the sandbox to drain.
    """
    options = _parser().parse_args(arguments)
    handler = logging.StreamHandler(log)
    handler.setFormatter(OneRecordFormatter(options.name))
    _of_sandbox.set(handler)
    return await _run(options, stop)


async def _run(options: argparse.Namespace, stop: asyncio.Event | None = None) -> int:
    """Run a role to its end, and log how it ends; return the exit code. stop: set to ask it to drain; None: signals to the process do that."""
    log = logging.getLogger("marlaas_worker")
    try:
        log.info("%s starts, process %d", options.role, os.getpid())
        await _serve(options, stop)
        log.info("%s has drained", options.role)
        return 0
    except Exception as error:
        cause = first_cause(error)
        text = str(cause) if isinstance(cause, MarlaasError) else f"{type(cause).__name__}: {cause}"
        log.critical("%s", text, exc_info=error)
        return 2 if isinstance(cause, InvalidInput) else 1


async def _serve(options: argparse.Namespace, stop: asyncio.Event | None) -> None:
    options.scratch.mkdir(parents=True, exist_ok=True)
    metrics = Metrics()
    async with _health(options.health, metrics):
        bus = await connect(options.nats, name=options.name, creds=options.creds)
        try:
            blobs = open_blobs(options.blobs)
            context = RoleContext(
                options.name,
                bus,
                blobs,
                options.scratch,
                stop or asyncio.Event(),
                metrics=metrics,
                creds=options.creds,
                shares_cpu=options.share_cpu,
            )
            metrics.connected, metrics.num_breaks = lambda: bus.connected, lambda: bus.num_breaks
            async with _alone(context) if stop is None else contextlib.nullcontext():
                await _role(options, context)
        finally:
            await bus.close()


@contextlib.asynccontextmanager
async def _alone(context: RoleContext) -> AsyncIterator[None]:
    """For a role that has this process to itself: stop it on signals to the process, and keep its start out of garbage collections."""
    async with collect_once_ready(lambda: context.metrics.ready()), stop_on_signals(context.stop):
        yield


@contextlib.asynccontextmanager
async def _health(port: int | None, metrics: Metrics) -> AsyncIterator[None]:
    """Serve health checks and metrics while the context is open; port None serves none and imports no HTTP server."""
    if port is None:
        yield
        return
    from marlaas_worker.health import health_server

    async with health_server(port, metrics):
        yield


def _role(options: argparse.Namespace, context: RoleContext) -> Awaitable[None]:
    """Return the coroutine that runs the chosen role. Only that role is imported, so that a sandbox process does not load torch."""
    set_memory_variables(options.role)
    match options.role:
        case "orchestrator":
            from marlaas_worker.orchestrator.service import serve as orchestrator

            return orchestrator(context)
        case "rollout":
            from marlaas_worker.rollout.service import serve as rollout

            return rollout(context, _pool(options))
        case "trainer":
            from marlaas_worker.trainer.service import serve as trainer

            return trainer(context, _pool(options))
        case "exporter":
            from marlaas_worker.exporter.service import serve as exporter

            return exporter(context, _job(options))
        case _:
            from marlaas_worker.sandbox.service import serve as sandbox

            return sandbox(
                context, _job(options), environment_socket=options.environment_socket, modules=options.modules
            )


def _pool(options: argparse.Namespace) -> PoolDocument:
    if options.pool_file is None:
        raise InvalidInput(f"role {options.role} needs --pool-file")
    return PoolDocument.model_validate_json(options.pool_file.read_bytes())


def _job(options: argparse.Namespace) -> JobDocument:
    if options.job_file is None:
        raise InvalidInput(f"role {options.role} needs --job-file")
    return JobDocument.model_validate_json(options.job_file.read_bytes())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m marlaas_worker", description=__doc__)
    parser.add_argument("role", choices=("orchestrator", "rollout", "trainer", "sandbox", "exporter"))
    parser.add_argument("--nats", required=True, metavar="URL", help="NATS server")
    parser.add_argument("--creds", type=Path, metavar="FILE", help="NATS credentials, read again at every connection")
    parser.add_argument("--blobs", required=True, metavar="URL", help="blob store, for example file:///var/lib/marlaas")
    parser.add_argument("--name", required=True, help="the replica's name, the same after a restart")
    parser.add_argument("--scratch", required=True, type=Path, metavar="DIR", help="folder of its own, may be empty")
    parser.add_argument("--pool-file", type=Path, metavar="FILE", help="PoolDocument as JSON (rollout, trainer)")
    parser.add_argument("--job-file", type=Path, metavar="FILE", help="JobDocument as JSON (sandbox, exporter)")
    parser.add_argument(
        "--environment-socket",
        type=Path,
        metavar="PATH",
        help="where the environment's own container listens (sandbox)",
    )
    parser.add_argument(
        "--modules", type=Path, metavar="DIR", help="where the environment's modules are searched first (sandbox)"
    )
    parser.add_argument(
        "--share-cpu",
        action="store_true",
        help="change the CPU share of this session, where one machine runs all roles (rollout)",
    )
    parser.add_argument("--health", type=int, metavar="PORT", help="answer HTTP there: /livez /readyz /metrics")
    return parser


def _set_up_logging(name: str) -> None:
    faulthandler.enable()
    handler = _LogHandler(sys.stderr)
    handler.setFormatter(OneRecordFormatter(name))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)


def _die_with_parent() -> None:
    """Have the kernel kill this process when the local runner exits; the runner passes its process id in MARLAAS_PARENT_PID."""
    parent = os.environ.get("MARLAAS_PARENT_PID")
    if parent is None or sys.platform != "linux":
        return
    die_with_parent()
    if os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
