"""The exporter over a bus: every row once and in order, the end, messages once, over kills of the exporter and trackers that are away."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from bench import hub_server, s3_server
from huggingface_hub import constants
from tests.harness import Harness, a_manifest, a_progress, a_step, identity, job_document
from tests.tables import data

from marlaas.trackers.seam import End, MemoryTracker
from marlaas_api import failpoints, subjects
from marlaas_api.bus import BusRefused
from marlaas_api.bus_memory import MemoryBus
from marlaas_api.messages import AdapterRequest, EvalRecord, ExportReport, Phase, PolicyRecord
from marlaas_api.wire import encode
from marlaas_worker.exporter import uploads
from marlaas_worker.exporter.destinations import TrackerDestination, WebhookDestination, safe_text
from marlaas_worker.exporter.service import Exporter
from marlaas_worker.orchestrator.service import serve
from marlaas_worker.role import end_tasks

ADAPTER = {
    "adapter_model.safetensors": b"weights" * 100_000,
    "adapter_config.json": b'{"base_model_name_or_path": "acme/base", "r": 4, "lora_alpha": 8}',
}


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
            elif isinstance(one, WebhookDestination):
                one.post = self.post
        task = asyncio.create_task(exporter.run())
        yield
        await end_tasks([task])

    async def succeed_with_adapters(self, spec: str = "hub_spec") -> None:
        """The job uploads adapters, has succeeded with two versions, and promotes the first."""
        self.document, ref = job_document(spec=data(__file__, spec)), None
        for version in (1, 2):
            files = {name: await self.blobs.put(f"v{version}", name, ADAPTER[name]) for name in ADAPTER}
            ref = await self.blobs.put("v", "m", encode(a_manifest(self.document, version, files=files, parent=ref)))
        await self.submit(self.document)
        await self.put_policy(PolicyRecord(uid=self.document.uid, version=2, manifest=ref), self.document)
        await self.evaluation(0)
        await self.steps(0, 1, 2, 3)
        await self.say(4, phase=Phase.SUCCEEDED, promoted={"policy": 1})

    async def report(self, wanted: Callable[[ExportReport], object]) -> ExportReport:
        return await self.wait_for(ExportReport, subjects.EXPORTS, self.document.ref.key, lambda one: bool(wanted(one)))

    def keys(self) -> list[str]:
        return [row.key for _, row in self.tracker.rows]


@pytest.fixture
async def scene(tmp_path, monkeypatch) -> Scene:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.test")
    monkeypatch.setenv("MARLAAS_WEBHOOK_1", "http://hooks.test/secret-path")
    monkeypatch.setattr("marlaas_worker.exporter.destinations.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(uploads, "ANSWER_S", 0.3)
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


@pytest.mark.slow
async def test_an_adapter_is_uploaded_once_over_kills_a_refusal_and_a_damaged_download(scene, monkeypatch):
    await scene.succeed_with_adapters()
    damaged = scene.scratch / "exporter" / "hub" / "policy@v1" / "adapter_model.safetensors"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"other")
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("HF_TOKEN_PATH", str(token := scene.scratch / "token"))
    with hub_server.serving() as hub:
        for name, value in hub.constants.items():
            monkeypatch.setattr(constants, name, value)
        errors, reads, last = [], [], MemoryBus.last
        monkeypatch.setattr(MemoryBus, "last", lambda bus, *name: reads.append(name[1]) or last(bus, *name))

        def note(told: ExportReport) -> bool:
            errors.append(error := told.destinations[0].error)
            if "token" in error:
                token.write_text("hf_other" if "no token" in error else hub_server.TOKEN)
            return bool(told.ended) and told.at == scene.now

        for scene.now in (1001.0, 1002.0):
            async with scene.exporting(), scene.role("orchestrator", serve):
                report = await scene.report(note)
        is_private, files = hub.models["acme/sums"]
        assert (is_private, sum("/commit/" in one for one in hub.asked)) == (True, 1)
    assert sum(one.startswith("step.") for one in reads) == 3 * 4, "by each exporter, and once for the uploads"
    assert (report.uploaded, report.destinations[0].url) == (("hub policy@v1",), f"{hub.url}/acme/sums")
    for words in (
        "there is no token",
        "adapter_model.safetensors has sha256",
        "does not let this token write to acme/sums",
    ):
        assert any(words in error for error in errors), errors
    card, curve = files.pop("README.md").decode(), files.pop("curve.png")
    assert (files, curve[:4]) == (ADAPTER, b"\x89PNG")
    assert "base_model: acme/base\n" in card
    assert "4 steps of" in card


@pytest.mark.slow
async def test_a_bucket_and_a_volume_have_a_marker_only_beside_all_files_of_its_version(scene, monkeypatch):
    await scene.succeed_with_adapters("stores_spec")
    folder, places = (
        scene.scratch / "volume" / "a" / "sums",
        {"exporter.upload.after_files", "exporter.upload.before_rename"},
    )
    for name, path in (("MARLAAS_S3_FOLDER", scene.scratch), ("MARLAAS_EXPORT_VOLUME", scene.scratch / "volume")):
        monkeypatch.setenv(name, str(path))

    def kill(name: str) -> None:
        if name in places:
            raise OSError(name)

    with s3_server.serving() as bucket:
        bucket.objects |= {
            "sums/marlaas.json": b'{"sha256": {"old.json": "00"}}',
            "sums/old.json": b"of another version",
        }
        (scene.scratch / "volume").mkdir()
        (scene.scratch / "AWS_X").touch()
        monkeypatch.setattr(failpoints, "hook", kill)
        async with scene.exporting(), scene.role("orchestrator", serve):
            await scene.report(lambda told: "the Secret has AWS_X, which is not used" in told.destinations[0].error)
            (scene.scratch / "AWS_X").unlink()
            await scene.report(lambda told: "there are no credentials for the bucket" in told.destinations[0].error)
            for name, value in bucket.variables.items():
                (scene.scratch / name).write_text(value)
            await scene.report(lambda told: {one.error.partition(": ")[2] for one in told.destinations} == places)
        assert bucket.objects.keys() == {f"sums/{name}" for name in (*ADAPTER, "README.md", "curve.png")}
        assert not folder.exists()
        folder.with_name(".sums.0123456789abcdef").mkdir()  # of a version before more steps
        for scene.now, hook in (
            (1001.0, None),
            (1002.0, kill),
        ):  # the second exporter has lost its report, and finds the markers
            monkeypatch.setattr(failpoints, "hook", hook)
            async with scene.exporting(), scene.role("orchestrator", serve):
                report = await scene.report(lambda told: told.ended and told.at == scene.now)
            await scene.put(subjects.EXPORTS, scene.document.ref.key, report.model_copy(update={"uploaded": ()}))
    assert list(folder.parent.iterdir()) == [folder]
    written = {one.name: one.read_bytes() for one in folder.iterdir()}
    assert bucket.objects == {f"sums/{name}": content for name, content in written.items()}
    assert (written.items() >= ADAPTER.items(), b'"version": 1,' in written["marlaas.json"]) == (True, True)
    assert sorted(report.uploaded) == ["s3 policy@v1", "volume policy@v1"]


def test_a_trackers_keys_of_s3_do_not_reach_the_bucket(monkeypatch):
    monkeypatch.setattr(uploads.os, "environ", {"AWS_SESSION_TOKEN": "a tracker's", "WANDB_API_KEY": "k"})
    uploads.drop_aws_variables()
    assert uploads.os.environ == {"WANDB_API_KEY": "k"}


async def test_the_orchestrator_sends_an_adapter_only_to_its_own_job_and_what_the_job_publishes(scene, monkeypatch):
    """It goes on although the bus refuses it once, as with the credential of an earlier release."""
    refused, listen = [], MemoryBus.listen

    def refused_once(bus, subject, *arguments):
        if subject.startswith("export.") and not refused:
            refused.append(subject)
            raise BusRefused("no permission")
        return listen(bus, subject, *arguments)

    monkeypatch.setattr(MemoryBus, "listen", refused_once)
    await scene.succeed_with_adapters()
    own = AdapterRequest(**identity(scene.document), agent="policy", version=1)
    async with scene.role("orchestrator", serve):
        assert (await uploads.ask(scene.bus, own)).files.keys() == ADAPTER.keys()
        assert refused
        file = {"file": "adapter_config.json"}
        for change in ({"uid": "old"}, {"agent": "critic"}, {"version": 2}, {"file": "../x"}, {**file, "offset": -1}):
            with pytest.raises(uploads.NotFetched, match=r"not exist any more|publishes no such|no such file"):
                await uploads.ask(scene.bus, own.model_copy(update=change))
        monkeypatch.setattr("marlaas_worker.exporter.uploads.encode", lambda _: encode(own))
        with pytest.raises(uploads.NotFetched, match="has not answered"):
            await uploads.ask(scene.bus, own.model_copy(update={"namespace": "team-b"}))
