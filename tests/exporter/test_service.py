"""The exporter over a bus: every row once and in order, the end, messages once, over kills of the exporter and trackers that are away."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from tests.harness import Harness, a_progress, a_step, identity, job_document
from tests.tables import data

from marlaas.trackers.seam import End, MemoryTracker
from marlaas_api import subjects
from marlaas_api.messages import EvalRecord, ExportReport, Phase
from marlaas_api.wire import encode
from marlaas_worker.exporter.destinations import TrackerDestination, safe_text
from marlaas_worker.exporter.service import Exporter
from marlaas_worker.role import end_tasks


class Scene(Harness):
    """A job on a bus, and the tracker and the webhook outside. away: names of those that cannot be reached."""

    def __init__(self, *given: object) -> None:
        self.document = job_document(spec=data(__file__, "spec"))
        self.tracker, self.posted, self.away, self.now = MemoryTracker(), list[str](), set[str](), 1000.0
        super().__init__(*given, clock=lambda: self.now)

    async def store(self, subject: Callable[..., str], number: int, record: object) -> None:
        await self.bus.publish(subject(*self.document.ref.key.split("."), self.document.uid, number), encode(record))

    async def steps(self, *numbers: int) -> None:
        for number in numbers:
            await self.store(subjects.step, number, a_step(self.document, number, version=number + 1, at=self.now))
            await self.say(step=number + 1, admitted=True)

    async def evaluation(self, version: int) -> None:
        values = {"step": version, "version": version, "at": self.now, "reward_mean": 0.5, "num_episodes": 1}
        await self.store(subjects.evaluation, version, EvalRecord(**identity(self.document), **values))

    async def say(self, step: int, **fields: object) -> None:
        progress = a_progress(self.document, **{"steps": 4, "step": step, "versions": {"policy": step}, **fields})
        await self.put(subjects.PROGRESS, self.document.ref.key, progress)

    def post(self, url: str, text: str) -> None:
        if "webhook" in self.away:
            raise OSError(f"no route to {url}")
        self.posted.append(text)

    def open(self, *_: object) -> MemoryTracker:
        if "mlflow" in self.away:
            raise OSError("no route to http://user:hunter2@mlflow.test")
        return self.tracker

    @contextlib.asynccontextmanager
    async def exporting(self) -> AsyncIterator[None]:
        """An exporter that is killed at the end."""
        exporter = Exporter(await self.context("exporter"), self.document, 0.01)
        for one in exporter.destinations:
            if isinstance(one, TrackerDestination):
                one.open = self.open
            else:
                one.post = self.post
        task = asyncio.create_task(exporter.run())
        yield
        await end_tasks([task])

    async def report(self, wanted: Callable[[ExportReport], object]) -> ExportReport:
        return await self.wait_for(ExportReport, subjects.EXPORTS, self.document.ref.key, lambda one: bool(wanted(one)))

    def keys(self) -> list[str]:
        return [row.key for _, row in self.tracker.rows]


@pytest.fixture
async def scene(tmp_path, monkeypatch) -> Scene:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.test")
    monkeypatch.setenv("MARLAAS_WEBHOOK_1", "http://hooks.test/secret-path")
    monkeypatch.setattr("marlaas_worker.exporter.destinations.FIRST_PAUSE_S", 0.01)
    made = Scene(tmp_path)
    await made.bus.ensure()
    await made.submit(made.document)
    return made


async def test_every_record_is_reported_once_and_in_order_over_kills_and_a_tracker_that_is_away(scene):
    await scene.evaluation(0)
    await scene.steps(0, 1)
    async with scene.exporting():
        await scene.until(lambda: len(scene.keys()) == 3)
    scene.tracker.fails_at = 4
    await scene.steps(2)
    await scene.evaluation(2)
    async with scene.exporting():
        report = await scene.report(lambda told: told.destinations[0].since)
        assert report.destinations[0].error == "OSError: no route to host"
        scene.tracker.fails_at = None
        await scene.until(lambda: len(scene.keys()) == 5)
        await scene.report(lambda told: told.destinations[0].since is None)
    await scene.steps(3)
    await scene.evaluation(4)
    await scene.say(4, phase=Phase.SUCCEEDED, finished_at=scene.now)
    for _ in range(2):
        async with scene.exporting():
            await scene.report(lambda told: told.ended == "Succeeded 4/4")
            await scene.until(lambda: scene.metrics["exporter"].ready())
    assert scene.keys() == ["eval 0", "step 0", "step 1", "step 2", "eval 2", "step 3", "eval 4"]
    assert [number for number, _ in scene.tracker.rows] == list(range(7))
    assert scene.tracker.closed == [End.SUCCEEDED]
    assert scene.posted == ["team-a/sums has succeeded: 4 of 4 steps"]


async def test_a_long_wait_is_told_once_and_again_after_the_next_step(scene):
    async with scene.exporting():
        await scene.report(lambda told: True)
        scene.now += 61
        await scene.report(lambda told: told.told)
    scene.now += 500
    async with scene.exporting():
        await scene.steps(0)
        await scene.until(lambda: scene.keys() == ["step 0"])
        scene.now += 120
        await scene.report(lambda told: len(told.told) == 2)
    queued, stuck = scene.posted
    assert queued == "team-a/sums waits for admission and has finished no step for 61 s (0 of 4 steps)"
    assert stuck.startswith("team-a/sums has finished no step for 2 min (1 of 4 steps)")


async def test_what_is_away_is_told_with_its_time_and_no_credential_and_holds_up_nothing_else(scene, monkeypatch):
    scene.away = {"mlflow", "webhook"}
    await scene.steps(0, 1, 2, 3)
    await scene.say(4, phase=Phase.FAILED, message="boom", reason="TooManyFaults")
    async with scene.exporting():
        report = await scene.report(lambda told: all(one.since for one in told.destinations))
        assert [(one.name, one.since) for one in report.destinations] == [("mlflow", 1000.0), ("webhook 1", 1000.0)]
        assert not any(secret in str(report) for secret in ("hunter2", "secret-path"))
        scene.away = {"mlflow"}
        await scene.report(lambda told: told.told == ("0 Failed 4/4",))
        scene.away = set()
        await scene.report(lambda told: told.ended == "Failed 4/4")
    assert scene.tracker.closed == [End.FAILED]
    assert scene.posted == ["team-a/sums has failed after 4 of 4 steps. TooManyFaults: boom"]
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert safe_text(ValueError("bad key\n0123456789abcdef")) == "ValueError: bad key …"
