"""The role on a real nats-server: what the fake cannot show."""

from marlaas_api.messages import ReplyPhase


async def test_turns_and_versions_over_a_real_server(nats_harness):
    harness = nats_harness
    _, job = await harness.serving()
    await harness.verified("rollout-0", job.adapter(0))
    for number in range(3):
        assert (await harness.ask(job.request(turn=number))).phase is ReplyPhase.RESULT
    await harness.commit_verified(job, 1)
    await harness.ask(job.request(index=1))
    turns = [await harness.turn(job.request(turn=2)), await harness.turn(job.request(index=1))]
    assert [(turn.version, turn.opens_segment) for turn in turns] == [(0, False), (1, True)]
    assert (await harness.emitted(job.document, "VersionVerified")).uid == job.uid


async def test_a_killed_server_loses_no_turn_and_costs_no_second_generation(nats_harness, shut_engine):
    harness = nats_harness
    _, job = await harness.serving(shut_engine)
    await harness.verified("rollout-0", job.adapter(0))  # it subscribes before it loads anything
    async with harness.asking(job.request()):
        await shut_engine.called.wait()
        await harness.nats.kill()
        shut_engine.open.set()
        await harness.nats.restart()
    assert (await harness.ask(job.request())).phase is ReplyPhase.RESULT
    assert (await harness.turn(job.request())).text == "yes"
    assert len(shut_engine.calls) == 1


async def test_a_replica_taken_over_on_a_real_server_goes_on_with_the_conversation(nats_harness):
    harness = nats_harness
    first, job = await harness.serving()
    await harness.ask(job.request(turn=0))
    await first.kill()
    second = await harness.replica("rollout-1")
    assert (await harness.ask(job.request(turn=1), of="rollout-1")).phase is ReplyPhase.RESULT
    fed = first.engine.calls[0].prompt_ids
    assert second.engine.calls[0].prompt_ids[: len(fed) + 4] == [*fed, *map(ord, "yes"), 1]
