"""Curves of ended jobs, drawn by a process of their own from the recorded files."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from marlaas.local.curves import CURVE_FILE, CurveDrawer, CurveRequest
from marlaas_api.cpu_shares import FULL_SHARE, LEAST_SHARE, share_of

pytestmark = pytest.mark.processes

LEAST = LEAST_SHARE if Path("/proc/self/autogroup").exists() else FULL_SHARE
"""Share of a process that no job waits for, where the kernel has shares of sessions."""


@dataclass
class Sessions:
    """Stands for the watchdog: the sessions that have begun and not ended. shares: their niceness when they begin."""

    open: set[int] = field(default_factory=set)
    shares: list[int] = field(default_factory=list)

    def add(self, session: int) -> None:
        self.open.add(session)
        self.shares.append(share_of(session))

    def remove(self, session: int) -> None:
        self.open.remove(session)


@pytest.fixture
def request_of(tmp_path, document, step, evaluation) -> Callable[[str], CurveRequest]:
    def recorded(name: str) -> CurveRequest:
        folder = tmp_path / name
        folder.mkdir()
        lines = [step(document(name), number).model_dump_json() for number in range(3)]
        (folder / "steps.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "evals.jsonl").write_text(evaluation(document(name), 0, 0.1).model_dump_json() + "\n")
        return CurveRequest(f"team-a/{name}", folder, 8)

    return recorded


async def test_all_requested_curves_are_drawn_but_one_that_cannot_be_is_logged(request_of, caplog):
    """Also those that are requested while others are drawn."""
    sessions, first, broken, last = Sessions(), request_of("first"), request_of("broken"), request_of("last")
    (broken.folder / "steps.jsonl").write_text("no record\n")
    with caplog.at_level(logging.WARNING):
        async with CurveDrawer(sessions) as curves:
            for request in (first, broken, last):
                curves.add(request)
            await curves.drain()
    assert [(one.folder / CURVE_FILE).exists() for one in (first, broken, last)] == [True, False, True]
    assert (last.folder / CURVE_FILE).read_bytes().startswith(b"\x89PNG")
    assert "team-a/broken" in caplog.text
    assert not sessions.open
    assert set(sessions.shares) == {LEAST}, "its imports take most of its time"


async def test_a_run_that_is_interrupted_does_not_wait_for_curves(request_of):
    sessions = Sessions()
    async with CurveDrawer(sessions) as curves:
        curves.add(request_of("a"))
    assert not sessions.open
