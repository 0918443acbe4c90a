"""What comes and goes with every job leaves nothing on the connection of a role that lives for months."""

from tests.api.bus_nats.patience import EPISODE, EPISODES, soon

from marlaas_api import subjects
from marlaas_api.bus_nats import NatsBus, pulls


def num_subscriptions(bus: NatsBus) -> int:
    return len(bus._link._client._subs)


async def test_consumers_made_anew_use_the_inbox_of_the_one_before(bus: NatsBus) -> None:
    before = num_subscriptions(bus)
    for number in range(10):
        await bus.publish(EPISODE, b"%d" % number)
        consumer = await bus.consumer(EPISODES, "team-a_job", EPISODE)
        (delivery,) = await soon(consumer.fetch(5, 5))
        assert delivery.stored.data == b"%d" % number
        await delivery.ack()
    assert num_subscriptions(bus) == before + 1


async def test_the_inboxes_of_consumers_that_nobody_asks_any_more_are_given_up(bus, monkeypatch) -> None:
    before = num_subscriptions(bus)
    for number in range(10):
        consumer = await bus.consumer(EPISODES, f"team-a_job-{number}", subjects.episode("team-a", f"job-{number}"))
        assert await soon(consumer.fetch(1, 0.01)) == []
    assert num_subscriptions(bus) == before + 10
    monkeypatch.setattr(pulls, "_IDLE_S", 0.0)
    assert await soon(consumer.fetch(1, 0.01)) == []
    assert num_subscriptions(bus) == before + 1
