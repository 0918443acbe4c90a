"""Progress that moves faster than people read: figures are written once a second, what matters at once, and the last word is never lost."""

import time

import pytest
from tests.operator.real.orchestrators import ADMITTED
from tests.operator.shell.harness import ServiceHarness, running_job

from marlaas_operator import reconcile

NUM_WORDS = 150


async def test_figures_alone_are_written_once_a_second_and_the_last_of_them_is() -> None:
    harness = ServiceHarness()
    async with running_job(harness) as orchestrator:
        before, begun = harness.count("patch status", "rljobs"), time.monotonic()
        for number in range(1, NUM_WORDS + 1):
            await orchestrator.say("team-a", "one", **ADMITTED, tokens=number)
        await harness.until(lambda: harness.status().get("tokens") == NUM_WORDS, "the last figure")
        written = harness.count("patch status", "rljobs") - before
    assert written <= (time.monotonic() - begun) / reconcile.FIGURES_EVERY_S + 2


async def test_an_end_is_told_at_once_whatever_was_written_just_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "FIGURES_EVERY_S", 3600.0)
    harness = ServiceHarness()
    over = {"phase": "Succeeded", "admitted": False, "reason": "Finished", "message": "done", "step": 4}
    async with running_job(harness) as orchestrator:
        await orchestrator.say("team-a", "one", **ADMITTED, tokens=7)
        await orchestrator.say("team-a", "one", **over, tokens=8)
        await harness.until(lambda: harness.status().get("phase") == "Succeeded", "succeeded")
        assert harness.status()["tokens"] == 8
