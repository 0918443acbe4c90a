"""What is broken is loud, and fails the agent that it belongs to."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from tests.harness import WITHIN_S
from tests.trainer.harness import TIMING, TrainerHarness
from tests.trainer.jobs import job
from tests.trainer.test_learner import away

from marlaas_api.bus import BusUnavailable, Stored
from marlaas_api.bus_memory import MemoryBus
from marlaas_api.messages import JobDocument
from marlaas_worker.trainer.model import BaseModel


async def test_a_target_that_the_model_lacks_fails_on_each_trainer_and_a_job_beside_it_goes_on(harness):
    document, neighbour = job(agent={"adapter": {"targets": ["qproj"]}}), job("neighbour")
    await harness.admit(document)
    await harness.admit(neighbour)
    async with harness.trainer():
        event = await harness.emitted(document, "TrainingFailed")
        await harness.play(neighbour, 1)
        async with harness.trainer("trainer-1"):
            reports = [await harness.report(lambda report: bool(report.broken), f"trainer-{n}") for n in (0, 1)]
    assert all(event.message.endswith(found.broken[f"{document.uid}.policy"]) for found in reports)
    assert "'qproj' is not a linear layer" in event.message
    assert "did you mean q_proj" in event.message


@contextlib.asynccontextmanager
async def without_its_adapter(harness: TrainerHarness, base: BaseModel, folder: Path) -> AsyncIterator[JobDocument]:
    """A job that has failed on a trainer, because the adapter to begin from was not there; now it is."""
    document = job(agent={"initFrom": {"path": str(folder)}})
    await harness.admit(document)
    async with harness.trainer():
        await harness.report(lambda report: bool(report.broken))
        away(base, folder)
        yield document


async def test_an_agent_that_failed_is_tried_again_after_a_while_and_then_no_longer_reported(harness, base, tmp_path):
    async with without_its_adapter(harness, base, tmp_path / "adapter") as document:
        harness.clock.at += 2 * TIMING.fault_s
        await harness.version(document, 0)
        await harness.report(lambda report: not report.broken)


async def test_a_job_that_another_trainer_can_train_is_no_longer_reported_as_broken(harness, base, tmp_path):
    async with without_its_adapter(harness, base, tmp_path / "adapter") as document, harness.trainer("trainer-1"):
        await harness.version(document, 0)
        found = await harness.report(lambda report: not report.broken)
    assert found.refused == ("team-a.sums.policy",)


async def test_a_turn_that_is_not_what_its_group_says_fails_the_agent_and_no_version_is_made(harness):
    document = job()
    async with harness.training(document):
        harness.tamper = lambda turn: turn.model_copy(update={"version": 5}) if turn.member == 1 else turn
        await harness.step(document, 0)
        event = await harness.emitted(document, "TrainingFailed")
    assert "version is 5" in event.message
    assert (await harness.record(document)).version == 0


async def test_a_turn_that_stays_missing_fails_the_agent(harness):
    document = job()
    async with harness.training(document):
        harness.tamper = lambda turn: None if turn.member == 1 else turn
        await harness.assign(document, 0, [0])
        clock = asyncio.create_task(harness.let_time_pass())
        event = await harness.emitted(document, "TrainingFailed")
        clock.cancel()
    assert "turn.team-a.sums.uid-sums-t0-1-1.0 is not recorded" in event.message


async def test_a_turn_that_comes_late_is_waited_for_also_after_a_long_outage(harness, monkeypatch):
    document, last = job(), MemoryBus.last
    unreachable, missing = asyncio.Event(), asyncio.Event()

    async def in_an_outage(bus: MemoryBus, stream: str, subject: str) -> None:
        unreachable.set()
        raise BusUnavailable("the bus cannot be reached")

    async def after_it(bus: MemoryBus, stream: str, subject: str) -> Stored | None:
        found = await last(bus, stream, subject)
        if found is None:
            missing.set()
        return found

    async with harness.training(document), asyncio.timeout(WITHIN_S):
        late = []
        harness.tamper = lambda turn: late.append(turn) if turn.member == 1 else turn
        monkeypatch.setattr(MemoryBus, "last", in_an_outage)
        await harness.step(document, 0)
        await unreachable.wait()
        harness.clock.at += 2 * TIMING.missing_turn_s
        monkeypatch.setattr(MemoryBus, "last", after_it)
        await missing.wait()
        for turn in late:
            await harness.publish_turn(turn)
        await harness.version(document, 1)
