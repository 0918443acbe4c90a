"""The role on a real nats-server: what the fake cannot show."""

from typing import Any

from marlaas_api.messages import ReplyPhase


async def test_turns_and_versions_over_a_real_server(nats_town: Any) -> None:
    town = nats_town
    await town.replica()
    job = await town.job()
    await town.verified("rollout-0", job.adapter(0))
    for number in range(3):
        assert (await town.ask(job.request(turn=number))).phase is ReplyPhase.RESULT
    await town.commit(job, 1)
    await town.verified("rollout-0", job.adapter(1))
    await town.ask(job.request(index=1))
    turns = [await town.turn(job.request(turn=2)), await town.turn(job.request(index=1))]
    assert [(turn.version, turn.opens_segment) for turn in turns] == [(0, False), (1, True)]
    assert (await town.story("VersionVerified")).uid == job.uid


async def test_a_killed_server_loses_no_turn_and_costs_no_second_generation(nats_town: Any, shut_engine: Any) -> None:
    town = nats_town
    await town.replica(engine=shut_engine)
    job = await town.job()
    async with town.asking(job.request()):
        await shut_engine.called.wait()
        await town.nats.kill()
        shut_engine.open.set()
        await town.nats.restart()
    assert (await town.ask(job.request())).phase is ReplyPhase.RESULT
    assert (await town.turn(job.request())).text == "yes"
    assert len(shut_engine.calls) == 1


async def test_a_replica_taken_over_on_a_real_server_goes_on_with_the_conversation(nats_town: Any) -> None:
    town = nats_town
    first = await town.replica("rollout-0")
    job = await town.job()
    await town.ask(job.request(turn=0))
    await first.kill()
    second = await town.replica("rollout-1")
    assert (await town.ask(job.request(turn=1), of="rollout-1")).phase is ReplyPhase.RESULT
    fed = first.engine.calls[0].prompt_ids
    assert second.engine.calls[0].prompt_ids[: len(fed) + 4] == [*fed, *map(ord, "yes"), 1]
