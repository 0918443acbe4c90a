"""A device's errors are not a job's: what ends the process, what ends one agent's training, and that nobody else notices."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.harness import WITHIN_S
from tests.trainer.fragile import Pass, fragile
from tests.trainer.harness import Apart, TrainerHarness
from tests.trainer.jobs import job

from marlaas_api import subjects, wire
from marlaas_api.errors import InvalidInput, first_cause
from marlaas_api.messages import ReplicaReport
from marlaas_worker.device_errors import DeviceLost
from marlaas_worker.trainer import model
from marlaas_worker.trainer.compute import Compute
from marlaas_worker.trainer.versions import read_version

ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"
STEPS = 3
FRAIL = {"adapter": {"rank": 16, "alpha": 16}}


@pytest.fixture(scope="module")
def undisturbed(apart: Apart) -> dict[str, bytes]:
    """The adapters that the jobs of this file end with, each trained alone."""
    jobs = job("sound"), job("frail", agent=FRAIL)
    return {one.job: apart(lambda harness, one=one: harness.trained(one, steps=STEPS))[0] for one in jobs}


async def reports(harness: TrainerHarness) -> list[ReplicaReport]:
    entries = await (await harness.bus.bucket(subjects.REPLICAS)).entries()
    return [wire.decode_as(ReplicaReport, entry.data) for entry in entries if entry.data is not None]


async def serve_until_lost(harness: TrainerHarness) -> DeviceLost:
    """One life of a trainer, which ends by itself."""
    with pytest.raises(BaseExceptionGroup) as caught:
        await harness.serve(await harness.context("trainer-0"))
    cause = first_cause(caught.value)
    assert isinstance(cause, DeviceLost)
    assert not isinstance(cause, InvalidInput)  # which would have an exit code that nobody restarts
    return cause


async def test_a_lost_device_ends_the_role_blames_no_job_and_the_next_process_goes_on_from_the_commits(
    harness, undisturbed, monkeypatch
):
    frail, sound = job("frail", agent=FRAIL), job("sound")
    faults = fragile(monkeypatch, lambda _: False)
    for document in (frail, sound):
        await harness.admit(document)

    def break_down(found: Pass) -> bool:
        if found.trained and found.rank == 16:
            raise torch.AcceleratorError(ILLEGAL)
        return False

    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
        life = tasks.create_task(serve_until_lost(harness))
        others = tasks.create_task(harness.play(sound, STEPS))
        await harness.play(frail, 1)
        faults.rule = break_down
        rest = tasks.create_task(harness.play(frail, STEPS - 1, first=1))
        lost = await life
        assert str(lost).startswith(
            "the trainer's device is lost (AcceleratorError: CUDA error: an illegal memory access was encountered)"
        )
        assert not harness.metrics["trainer-0"].alive()
        assert [report.broken for report in await reports(harness)] == [{}]
        assert {(await harness.record(document)).holder for document in (frail, sound)} == {""}
        faults.rule = lambda _: False
        async with harness.trainer():
            await asyncio.gather(others, rest)
        assert harness.metrics["trainer-0"].alive()
    assert {name: await harness.adapter(job(name)) for name in ("frail", "sound")} == undisturbed
    told = [
        wire.decode(one.data)
        for one in await harness.bus.replay(subjects.EVENTS, subjects.event("team-a", "frail", "trainer"))
    ]
    assert "TrainingFailed" not in {getattr(event, "reason", "") for event in told}


async def test_after_a_sticky_error_nothing_more_is_computed_in_the_process():
    compute, done = Compute(1), []

    def fail() -> None:
        raise RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")

    with pytest.raises(DeviceLost, match="CUDNN_STATUS_INTERNAL_ERROR"):
        await compute.run(fail)
    with pytest.raises(DeviceLost, match="CUDNN_STATUS_INTERNAL_ERROR"):
        await compute.run(lambda: done.append(1))
    assert not done
    compute.close()


# isolation ----------------------------------------------------------------------------------------------------------


def at(place: str, error: Exception | None, passes: int) -> Callable[[Pass], bool]:
    """Fail the frail job's given pass and all that follow, with an error or with gradients that are not finite."""
    seen = []

    def rule(found: Pass) -> bool:
        if (found.place, found.rank) != (place, 16) or not found.trained:
            return False
        seen.append(found)
        if len(seen) >= passes and error is not None:
            raise error
        return len(seen) >= passes

    return rule


@pytest.mark.parametrize(
    ("place", "error", "passes", "reason"),
    [
        ("backward", torch.OutOfMemoryError("CUDA out of memory"), 3, "TrainingFailed"),
        ("forward", RuntimeError("a kernel refused its arguments"), 2, "TrainingFailed"),
        ("backward", None, 1, "UpdateSkipped"),
    ],
    ids=["no memory in backward", "error in forward", "not finite"],
)
async def test_what_goes_wrong_in_one_agents_pass_changes_no_bit_of_anothers_adapter(
    harness, undisturbed, monkeypatch, place, error, passes, reason
):
    frail, sound = job("frail", agent=FRAIL), job("sound")
    faults = fragile(monkeypatch, at(place, error, passes))
    await harness.admit(frail)
    await harness.admit(sound)
    async with harness.trainer(), asyncio.TaskGroup() as tasks:
        doomed = tasks.create_task(harness.play(frail, STEPS))
        await harness.play(sound, STEPS)
        await harness.emitted(frail, reason)
        doomed.cancel()
    assert faults.failed
    assert await harness.adapter(sound) == undisturbed["sound"]


async def test_gradients_that_are_not_finite_leave_version_and_moments_as_they_were_and_fail_the_third_time(
    harness, monkeypatch
):
    document = job(agent=FRAIL)
    faults = fragile(monkeypatch, lambda _: False)
    async with harness.training(document):
        await harness.play(document, 1)
        faults.rule = lambda found: found.place == "backward"
        await harness.play(document, 1, first=1)
        event = (await harness.emitted(document, "UpdateSkipped")).message
        assert event.endswith("version 2 has the weights of version 1")
    async with harness.trainer("trainer-1"):  # which knows of the first from the commit alone
        await harness.play(document, 1, first=2)
        await harness.step(document, 3)
        event = (await harness.emitted(document, "TrainingFailed")).message
    assert "is not finite (its norm is nan) in 3 steps in a row, the last of them step 3" in event
    history = await harness.history(document)
    assert [made.metrics.get("skipped_update") for made in history] == [1.0, 1.0, 0.0, None]
    assert (await read_version(harness.blobs, history[0]))[1].num_updates == 1
    assert len({made.files["adapter_model.safetensors"].sha256 for made in history[:3]}) == 1


def test_an_adapter_whose_making_fails_leaves_nothing_behind(base, monkeypatch):
    def no_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    for owner, name in ((model, "new_adapter"), (base, "logprobs")):  # the first adapter's activations are measured
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, no_memory)
            with pytest.raises(torch.OutOfMemoryError):
                base.attach(16, 16, ())
        assert base.adapters == ()
    assert len(base.attach(16, 16, ()).parameters) == 2 * 14
