"""Seconds for which jobs' versions had slots, by hand."""

from marlaas_worker.rollout.slot_seconds import SlotSeconds


def test_every_version_counts_from_its_load_until_its_slot_is_free():
    seconds = SlotSeconds()
    seconds.begin("a.v1", "a", 10.0)
    seconds.begin("a.v2", "a", 12.0)
    seconds.begin("b.v1", "b", 13.0)
    assert seconds.totals(14.0) == {"a": 6.0, "b": 1.0}
    seconds.end("a.v1", 15.0)
    seconds.end("a.v1", 99.0)
    assert seconds.totals(16.0) == {"a": 9.0, "b": 3.0}


def test_an_engine_that_stops_ends_all_and_a_job_that_is_gone_leaves_nothing():
    seconds = SlotSeconds()
    seconds.begin("a.v1", "a", 10.0)
    seconds.begin("b.v1", "b", 10.0)
    seconds.end_all(11.0)
    assert seconds.totals(20.0) == {"a": 1.0, "b": 1.0}
    seconds.begin("a.v1", "a", 20.0)
    seconds.end("a.v1", 22.0)
    assert seconds.totals(30.0) == {"a": 3.0, "b": 1.0}
    seconds.begin("a.v2", "a", 25.0)
    seconds.forget(["a"])
    seconds.end("a.v2", 29.0)
    assert seconds.totals(30.0) == {"b": 1.0}
