"""What is broken is loud, and fails the agent that it belongs to."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.following import WITHIN_S, let_time_pass, report
from tests.trainer.worlds import QUICK, World, job

from marlaas_api.messages import JobDocument, JobEvent
from marlaas_worker.adapters import AdapterConfig, write_adapter
from marlaas_worker.trainer.model import ModelUnusable


async def failure(world: World, document: JobDocument) -> JobEvent:
    """How training failed, on the first and on another trainer; a job beside it goes on."""
    neighbour = job("neighbour")
    await world.admit(document)
    await world.admit(neighbour)
    async with world.trainer(), asyncio.timeout(WITHIN_S):
        event = await world.told(document, "TrainingFailed")
        await world.play(neighbour, 1)
        async with world.trainer("trainer-1"):
            reports = [await report(world, lambda report: bool(report.broken), f"trainer-{n}") for n in (0, 1)]
    assert all(event.message.endswith(found.broken[document.uid]) for found in reports)
    return event


async def test_a_target_that_the_model_lacks_is_named_with_the_nearest_right_ones(world: World) -> None:
    event = await failure(world, job(agent={"adapter": {"targets": ["qproj"]}}))
    assert "'qproj' is no linear layer" in event.message
    assert "did you mean q_proj" in event.message


async def test_an_adapter_to_begin_from_that_is_not_there_is_named(world: World, tmp_path: Path) -> None:
    event = await failure(world, job(agent={"initFrom": {"path": str(tmp_path / "nowhere")}}))
    assert "no adapter_config.json in the adapter" in event.message


async def test_an_agent_that_failed_is_tried_again_after_a_while_and_then_no_longer_reported(
    world: World, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    document = job(agent={"initFrom": {"path": str(folder)}, "adapter": {"rank": 1, "alpha": 1, "targets": ["q_proj"]}})
    await world.admit(document)
    async with world.trainer(), asyncio.timeout(WITHIN_S):
        await report(world, lambda report: bool(report.broken))
        folder.mkdir()
        weights = {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{kind}.weight" for kind in "AB"}
        shapes = {"A": (1, 64), "B": (64, 1)}
        tensors = {name: torch.ones(shapes[name[-8]]) for name in weights}
        for name, data in write_adapter(tensors, AdapterConfig(1, 1)).items():
            (folder / name).write_bytes(data)
        world.clock.at += 2 * QUICK.fault_s
        await world.version(document, 0)
        await report(world, lambda report: not report.broken)


async def test_a_step_for_another_version_fails_the_agent(world: World) -> None:
    document = job()
    await world.admit(document)
    async with world.trainer(), asyncio.timeout(WITHIN_S):
        await world.version(document, 0)
        await world.assign(document, 0, [0], base_version=3)
        event = await world.told(document, "TrainingFailed")
    assert "to be trained at version 3, and policy is at 0" in event.message


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"uid": "uid-stranger"}, "uid is 'uid-stranger'"),
        ({"version": 5}, "version is 5"),
        ({"temperature": 1.0}, "temperature is 1.0"),
        ({"adapter_sha256": "0" * 64}, "adapter_sha256 is '0000"),
        ({"logprobs": b"\0\0\0\0"}, "generated tokens with 1 logprobs"),
    ],
    ids=["uid", "version", "temperature", "adapter", "logprobs"],
)
async def test_a_turn_that_is_not_what_its_group_says_fails_the_agent_and_no_version_is_made(
    world: World, change: dict[str, Any], text: str
) -> None:
    document = job()
    await world.admit(document)
    async with world.trainer(), asyncio.timeout(WITHIN_S):
        await world.version(document, 0)
        world.tamper = lambda turn: turn.model_copy(update=change) if turn.member == 1 else turn
        await world.assign(document, 0, [0, 1])
        await world.close(document, 0, 2)
        event = await world.told(document, "TrainingFailed")
    assert text in event.message
    assert (await world.record(document)).version == 0


async def test_a_turn_that_stays_missing_fails_the_agent(world: World) -> None:
    document = job()
    await world.admit(document)
    async with world.trainer(), asyncio.timeout(WITHIN_S):
        await world.version(document, 0)
        world.tamper = lambda turn: None if turn.member == 1 else turn
        await world.assign(document, 0, [0])
        clock = asyncio.create_task(let_time_pass(world))
        event = await world.told(document, "TrainingFailed")
        clock.cancel()
    assert "turn.team-a.sums.uid-sums-t0-1-1.0 is not recorded" in event.message


async def test_a_turn_that_comes_late_is_waited_for(world: World) -> None:
    document = job()
    await world.admit(document)
    async with world.trainer(), asyncio.timeout(WITHIN_S):
        await world.version(document, 0)
        late = []
        world.tamper = lambda turn: late.append(turn) if turn.member == 1 else turn
        await world.assign(document, 0, [0, 1])
        await world.close(document, 0, 2)
        await report(world, lambda report: report.busy_s > 0)
        for turn in late:
            await world.publish_turn(turn)
        await world.version(document, 1)


async def test_a_pool_without_a_model_says_where_it_looked(world: World, tmp_path: Path) -> None:
    world.model = tmp_path / "nothing"
    with pytest.raises(ModelUnusable, match=r"no base model at .*nothing"):
        await world.serve("trainer-0", asyncio.Event())
