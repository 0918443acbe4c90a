"""Seconds for which jobs' versions had slots, by hand."""

from marlaas_api.names import AdapterRef
from marlaas_worker.rollout.slot_seconds import SlotSeconds


def version(uid: str, number: int, agent: str = "policy") -> AdapterRef:
    return AdapterRef("team-a", "sums", uid, agent, number)


def test_every_version_counts_for_its_agent_from_its_load_until_its_slot_is_free():
    seconds = SlotSeconds()
    seconds.begin(version("a", 1), 10.0)
    seconds.begin(version("a", 2), 12.0)
    seconds.begin(version("a", 1, "critic"), 12.5)
    seconds.begin(version("b", 1), 13.0)
    assert seconds.totals(14.0) == {"a": {"policy": 6.0, "critic": 1.5}, "b": {"policy": 1.0}}
    seconds.end(version("a", 1).engine_name, 15.0)
    seconds.end(version("a", 1).engine_name, 99.0)
    assert seconds.totals(16.0) == {"a": {"policy": 9.0, "critic": 3.5}, "b": {"policy": 3.0}}


def test_an_engine_that_stops_ends_all_and_a_job_that_is_gone_leaves_nothing():
    seconds = SlotSeconds()
    seconds.begin(version("a", 1), 10.0)
    seconds.begin(version("b", 1), 10.0)
    seconds.end_all(11.0)
    assert seconds.totals(20.0) == {"a": {"policy": 1.0}, "b": {"policy": 1.0}}
    seconds.begin(version("a", 1), 20.0)
    seconds.end(version("a", 1).engine_name, 22.0)
    assert seconds.totals(30.0) == {"a": {"policy": 3.0}, "b": {"policy": 1.0}}
    seconds.begin(version("a", 2), 25.0)
    seconds.begin(version("a", 2, "critic"), 25.0)
    seconds.forget(["a"])
    seconds.end(version("a", 2).engine_name, 29.0)
    assert seconds.totals(30.0) == {"b": {"policy": 1.0}}
