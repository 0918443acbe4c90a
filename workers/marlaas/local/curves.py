"""Draws the learning curves of ended jobs in a process with the lowest share of the CPU while other jobs run.

matplotlib takes seconds of CPU, which the jobs that still run need. Once all jobs have ended, the user waits for it, and it gets a
full share: with the lowest, a machine with other users takes minutes. The process draws one batch of jobs from their recorded files
and ends. Most of its work is its imports. So while jobs run, the next batch waits PAUSE_S for the curves of other jobs that end.
A curve that cannot be drawn is logged; `marlaas plot` can draw it later.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter

from marlaas.local.folder import write
from marlaas.local.records import read_line
from marlaas.local.sandbox_host import Sessions
from marlaas.local.watchdog import kill_session
from marlaas.plots.figure import CURVE_FILE, draw_curve
from marlaas_api.cpu_shares import FULL_SHARE, LEAST_SHARE, set_share
from marlaas_api.last_words import last_words
from marlaas_api.messages import EvalRecord, StepRecord

log = logging.getLogger(__name__)
PAUSE_S = 30.0
"""Seconds between two batches while jobs run."""


@dataclass(frozen=True, slots=True)
class CurveRequest:
    """A job whose curve is to be drawn. folder: of its records. group_size: episodes of a group."""

    title: str
    folder: Path
    group_size: int


_REQUESTS = TypeAdapter(list[CurveRequest])


class CurveDrawer:
    """Draws curves by request, one batch at a time. A later request for the same folder replaces the earlier one."""

    def __init__(self, watchdog: Sessions) -> None:
        self._watchdog = watchdog
        self._queued: dict[Path, CurveRequest] = {}
        self._drawing: asyncio.Task[None] | None = None
        self._all_ended = asyncio.Event()
        self._pid: int | None = None

    def add(self, request: CurveRequest) -> None:
        """Draw a job's curve soon."""
        self._queued[request.folder] = request
        if self._drawing is None or self._drawing.done():
            self._drawing = asyncio.create_task(self._draw_all(), name="draw curves")

    async def drain(self) -> None:
        """Draw the requested curves with a full share of the CPU, and wait until that is done."""
        self._all_ended.set()
        if self._pid is not None:
            _give(self._pid, FULL_SHARE)
        if self._drawing is not None:
            await self._drawing

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the drawing process; curves that are not drawn yet, or wait for the next batch, are missing then."""
        if self._drawing is not None:
            self._drawing.cancel()
            await asyncio.wait({self._drawing})

    async def _draw_all(self) -> None:
        while self._queued:
            batch, self._queued = list(self._queued.values()), {}
            await self._draw(batch)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_S):
                    await self._all_ended.wait()

    async def _draw(self, batch: Sequence[CurveRequest]) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "marlaas.local.curves"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self._pid = process.pid
        # Before the process gets its requests: most of its work is its imports.
        _give(process.pid, FULL_SHARE if self._all_ended.is_set() else LEAST_SHARE)
        self._watchdog.add(process.pid)
        try:
            _, errors = await process.communicate(_REQUESTS.dump_json(list(batch)))
            if process.returncode:
                log.warning("curves are missing: %s", last_words(errors.decode(errors="replace")))
        finally:
            kill_session(process.pid)
            await process.wait()
            self._watchdog.remove(process.pid)
            self._pid = None


def _give(pid: int, share: int) -> None:
    """Set the share of a process in a session of its own: of the session, and where the kernel has no such shares, of the process."""
    set_share(pid, share)
    with contextlib.suppress(OSError):  # Only root may raise the second one again.
        os.setpriority(os.PRIO_PROCESS, pid, share)


def draw(request: CurveRequest) -> None:
    """Draw a job's curve from its files `steps.jsonl` and `evals.jsonl`. Raises OSError, ValueError, InvalidInput."""
    steps = [read_line(StepRecord, line) for line in _lines(request.folder / "steps.jsonl")]
    evals = [read_line(EvalRecord, line) for line in _lines(request.folder / "evals.jsonl")]
    write(request.folder / CURVE_FILE, draw_curve(request.title, steps, evals, request.group_size))


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


def main() -> None:
    """Draw the curves of the jobs that stdin lists, and exit with 1 if one of them failed."""
    failed = 0
    for request in _REQUESTS.validate_json(sys.stdin.buffer.read()):
        try:
            draw(request)
        except Exception as error:
            failed = 1
            sys.stderr.write(f"{request.title}: {type(error).__name__}: {error}\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
