"""What comes and goes with every job leaves nothing on the connection of a role that lives for months."""

from tests.api.bus_nats.patience import EPISODES, soon

from marlaas_api import subjects
from marlaas_api.bus_nats import NatsBus, pulls


def num_subscriptions(bus: NatsBus) -> int:
    return len(bus._link._client._subs)


async def test_the_inboxes_of_consumers_that_nobody_asks_any_more_are_given_up(bus, monkeypatch) -> None:
    before = num_subscriptions(bus)
    for number in range(10):
        consumer = await bus.consumer(EPISODES, f"team-a_job-{number}", subjects.episode("team-a", f"job-{number}"))
        assert await soon(consumer.fetch(1, 0.01)) == []
    assert num_subscriptions(bus) == before + 10
    monkeypatch.setattr(pulls, "_IDLE_S", 0.0)
    assert await soon(consumer.fetch(1, 0.01)) == []
    assert num_subscriptions(bus) == before + 1
