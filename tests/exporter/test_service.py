"""The exporter over a bus: every row once and in order, the end, messages once, over kills of the exporter and trackers that are away."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.harness import a_progress, a_step, identity, job_document

from marlaas.trackers.seam import End, MemoryTracker
from marlaas_api import subjects
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.messages import EvalRecord, ExportReport, JobDocument, Phase
from marlaas_api.wire import decode_as, encode
from marlaas_worker.exporter.destinations import TrackerDestination, safe_text
from marlaas_worker.exporter.service import Exporter
from marlaas_worker.role import RoleContext, end_tasks

NOTIFY = [{"webhook": {"secretRef": {"name": "slack", "key": "url"}}, "waitSeconds": 60}]
URL = "http://hooks.test/secret-path"


@dataclass
class Scene:
    """A job on a bus, and the tracker and the webhook outside."""

    folder: Path
    document: JobDocument = field(
        default_factory=lambda: job_document(
            spec={
                "training": {"steps": 4},
                "evaluation": {"every": 2, "tasks": 1},
                "export": {"trackers": ["mlflow", "tensorboard"], "notify": NOTIFY},
            }
        )
    )
    server: MemoryServer = field(default_factory=MemoryServer)
    tracker: MemoryTracker = field(default_factory=MemoryTracker)
    posted: list[str] = field(default_factory=list)
    away: set[str] = field(default_factory=set)
    now: float = 1000.0

    async def put(self, bucket: str, message: object) -> None:
        key = subjects.job_key(self.document.namespace, self.document.job)
        await (await self.bus.bucket(bucket)).put(key, encode(message))

    async def begin(self) -> None:
        self.bus = self.server.connect("test")
        await self.bus.ensure()
        await self.put(subjects.JOBS, self.document)

    async def steps(self, *numbers: int) -> None:
        for number in numbers:
            record = a_step(self.document, number, version=number + 1, at=self.now)
            await self.bus.publish(subjects.step("team-a", "sums", self.document.uid, number), encode(record))
            await self.progress(step=number + 1, versions={"policy": number + 1})

    async def evaluation(self, version: int) -> None:
        values = {"step": version, "version": version, "at": self.now, "reward_mean": 0.5, "num_episodes": 1}
        record = EvalRecord(**identity(self.document), **values)
        await self.bus.publish(subjects.evaluation("team-a", "sums", self.document.uid, version), encode(record))

    async def progress(self, **fields: object) -> None:
        await self.put(subjects.PROGRESS, a_progress(self.document, **{"admitted": True, "steps": 4, **fields}))

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
        context = RoleContext("exporter-0", self.server.connect("exporter"), None, self.folder, now=lambda: self.now)
        exporter = Exporter(context, self.document, 0.01)
        for one in exporter.destinations:
            if isinstance(one, TrackerDestination):
                one.open = self.open
            else:
                one.post = self.post
        task = asyncio.create_task(exporter.run())
        yield
        await end_tasks([task])

    async def report(self) -> ExportReport | None:
        entry = await (await self.bus.bucket(subjects.EXPORTS)).get("team-a.sums")
        return decode_as(ExportReport, entry.data) if entry is not None else None

    async def until(self, look) -> ExportReport:
        async with asyncio.timeout(30):
            while (report := await self.report()) is None or not look(report):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return report

    def keys(self) -> list[str]:
        return [row.key for _, row in self.tracker.rows]


@pytest.fixture
async def scene(tmp_path, monkeypatch) -> Scene:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.test")
    monkeypatch.setenv("MARLAAS_WEBHOOK_1", URL)
    monkeypatch.setattr("marlaas_worker.exporter.destinations.FIRST_PAUSE_S", 0.01)
    made = Scene(tmp_path)
    await made.begin()
    return made


async def test_every_record_is_reported_once_and_in_order_over_kills_and_a_tracker_that_is_away(scene):
    await scene.evaluation(0)
    await scene.steps(0, 1)
    async with scene.exporting():
        await scene.until(lambda _: len(scene.tracker.rows) == 3)
    scene.tracker.fails_at = 4
    await scene.steps(2)
    await scene.evaluation(2)
    async with scene.exporting():
        report = await scene.until(lambda told: told.destinations[0].since)
        assert report.destinations[0].error == "OSError: no route to host"
        scene.tracker.fails_at = None
        report = await scene.until(lambda told: told.destinations[0].since is None and len(scene.keys()) == 5)
    await scene.steps(3)
    await scene.evaluation(4)
    await scene.progress(phase=Phase.SUCCEEDED, step=4, versions={"policy": 4}, admitted=False, finished_at=scene.now)
    async with scene.exporting():
        await scene.until(lambda told: told.ended == "Succeeded 4/4")
    expected = ["eval 0", "step 0", "step 1", "step 2", "eval 2", "step 3", "eval 4"]
    assert scene.tracker.rows == [(n, row) for n, (_, row) in enumerate(scene.tracker.rows)]
    assert scene.keys() == expected
    async with scene.exporting():
        await scene.until(lambda told: told.ended)
        await asyncio.sleep(0.05)
    assert scene.tracker.closed == [End.SUCCEEDED]
    assert scene.posted == ["team-a/sums has succeeded: 4 of 4 steps"]


async def test_a_long_wait_is_told_once_and_again_after_the_next_step(scene):
    async with scene.exporting():
        await scene.until(lambda told: True)
        scene.now += 61
        await scene.until(lambda told: told.told)
    scene.now += 500
    async with scene.exporting():
        await scene.steps(0)
        await scene.until(lambda _: scene.keys() == ["step 0"])
        scene.now += 120
        await scene.until(lambda told: len(told.told) == 2)
    queued, stuck = scene.posted
    assert queued == "team-a/sums waits for admission and has finished no step for 61 s (0 of 4 steps)"
    assert stuck.startswith("team-a/sums has finished no step for 2 min (1 of 4 steps)")


async def test_what_is_away_is_told_with_its_time_and_no_credential_and_holds_up_nothing_else(scene):
    scene.away = {"mlflow", "webhook"}
    await scene.steps(0, 1, 2, 3)
    await scene.progress(phase=Phase.FAILED, step=4, message="<!channel>", reason="TooManyFaults", admitted=False)
    async with scene.exporting():
        report = await scene.until(lambda told: all(one.since for one in told.destinations))
        assert [(one.name, one.since) for one in report.destinations] == [("mlflow", 1000.0), ("webhook 1", 1000.0)]
        assert "hunter2" not in str(report)
        assert "secret-path" not in str(report)
        scene.away = {"mlflow"}
        await scene.until(lambda told: told.told == ("0 Failed 4/4",))
        scene.away = set()
        await scene.until(lambda told: told.ended == "Failed 4/4")
    assert scene.tracker.closed == [End.FAILED]
    assert scene.posted == ["team-a/sums has failed after 4 of 4 steps. TooManyFaults: <!channel>"]


def test_an_error_shows_no_value_of_a_secret(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert safe_text(ValueError("bad key\n0123456789abcdef")) == "ValueError: bad key …"
