"""The permissions of the platform's roles on a real nats-server: what each needs is allowed, and a calibration is its pool's."""

import pytest
from tests.api.attacks import MINE, consumer
from tests.api.conftest import BusHarness

from marlaas_api import subjects
from marlaas_api.bus_memory.stream import matches
from marlaas_api.bus_users import OrchestratorUser, RolloutUser, RunnerUser, TrainerUser, permissions

pytestmark = pytest.mark.processes


async def test_every_role_of_the_platform_may_do_its_work(harness: BusHarness) -> None:
    """The roles' own tests do this without permissions: claiming, compare-and-set, recording."""
    rollout, trainer, runner = [
        await harness.connect(user) for user in (RolloutUser("tiny"), TrainerUser("tiny"), RunnerUser())
    ]
    await (await rollout.bucket("pins")).create("team-a.mine.policy.u1-t0", b"0")
    await (await rollout.bucket("replicas")).put("rollout.tiny.rollout-0", b"report")
    await rollout.publish(subjects.turn("team-a", "mine", "u1-t0-0-1", 0), b"turn", expect_last=0)
    await rollout.publish(subjects.event("team-a", "mine", "rollout"), b"event", message_id="told")
    assert len(await rollout.replay(subjects.TURNS, subjects.turn("team-a", "mine", "u1-t0-0-1", "*"))) == 1
    await harness.owner.publish(subjects.group("team-a", "mine", "policy"), b"group", expect_last=0)
    groups = await trainer.consumer(subjects.GROUPS, consumer(MINE, "policy", "trainer"), "group.team-a.mine.policy")
    (delivery,) = await groups.fetch(1, 10)
    await delivery.ack()
    assert await trainer.last(subjects.TURNS, subjects.turn("team-a", "mine", "u1-t0-0-1", 0)) is not None
    policy = await trainer.bucket("policy")
    entry = await policy.get("team-a.mine.policy")
    assert entry is not None
    await policy.update("team-a.mine.policy", b"next", entry.revision)
    await trainer.delete_consumer(subjects.GROUPS, consumer(MINE, "policy", "trainer"))
    await runner.ensure()
    reader = await runner.consumer(subjects.EPISODES, consumer(MINE, "reader"), subjects.episode("team-a", "mine"))
    assert await reader.fetch(1, 0.01) == []
    assert await harness.owner.position(subjects.EPISODES, consumer(MINE, "reader")) is not None
    assert (await harness.owner.state(subjects.TURNS)).last_sequence > 0
    await harness.owner.purge(subjects.TURNS, subjects.turn("team-a", "mine", "*", "*"), up_to=2)
    await runner.delete_consumer(subjects.EPISODES, consumer(MINE, "reader"))
    await harness.owner.purge(subjects.EPISODES, subjects.episode("team-a", "mine"))
    for bus in (rollout, trainer, runner):
        await bus.close()


async def test_a_pools_calibration_is_written_by_its_trainer_and_read_by_its_rollout_alone(harness: BusHarness) -> None:
    """Whoever could write it could have an engine with a wrong adapter serve."""
    key = subjects.calibration_key("tiny", "float32")
    trainer = await (await harness.connect(TrainerUser("tiny"))).bucket(subjects.CALIBRATIONS, inspected=False)
    rollout = await (await harness.connect(RolloutUser("tiny"))).bucket(subjects.CALIBRATIONS, inspected=False)
    await trainer.put(key, b"calibration")
    found = await rollout.get(key)
    assert found is not None
    assert found.data == b"calibration"
    written, asked = f"$KV.calibrations.{key}", f"$JS.API.DIRECT.GET.KV_calibrations.$KV.calibrations.{key}"
    for user in (RolloutUser("large"), TrainerUser("large"), OrchestratorUser(), RunnerUser(), MINE):
        assert not any(matches(may, subject) for may in permissions(user).publish for subject in (written, asked)), user
    assert not any(matches(granted, written) for granted in permissions(RolloutUser("tiny")).publish)
