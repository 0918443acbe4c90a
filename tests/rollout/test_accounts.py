"""Totals of jobs and tenants: tokens, engine time, slots, use of other replicas, and when the totals are dropped."""

import pytest

from marlaas_api.names import AdapterRef
from marlaas_worker.rollout.accounts import GONE_S, GoneJobs
from marlaas_worker.rollout.engine_meter import DecodeTime, EngineMeter, recent_tokens
from marlaas_worker.rollout.slot_seconds import SlotSeconds


def test_shares_of_the_engines_time_add_up_to_the_time_it_was_busy():
    meter = EngineMeter()
    a = meter.enter(10.0)
    b = meter.enter(12.0)
    meter.leave(a, "one", 16.0)
    meter.leave(b, "two", 17.0)
    meter.advance(100.0)
    c = meter.enter(100.0)
    meter.leave(c, "one", 101.0)
    assert meter.busy_s == pytest.approx(8.0)
    assert meter.job_engine_s == pytest.approx({"one": 2.0 + 2.0 + 1.0, "two": 2.0 + 1.0})


def test_tokens_count_half_after_a_minute_and_are_forgotten():
    recent = recent_tokens()
    recent.add({"a": 100}, 0.0)
    recent.add({"b": 8, "a": 10}, 60.0)
    assert recent.at(60.0) == {"a": 60.0, "b": 8.0}
    assert recent.at(300.0) == {"a": 3.75}


def test_unfinished_generations_are_estimated_from_the_recent_time_of_a_token():
    decode = DecodeTime()
    assert decode.tokens_in(0.0, 100) == 1
    for _ in range(200):
        decode.note(5.0, 50)
        decode.note(0.0, 0)
    assert decode.tokens_in(0.95, 100) == 10
    assert decode.tokens_in(60.0, 100) == 100


def test_totals_are_kept_for_a_minute_after_the_document_is_gone():
    gone = GoneJobs()
    for present, counted, now, expired in (
        (["a", "b"], ["a"], 0.0, set()),
        (["b"], ["a"], 10.0, set()),
        (["a", "b"], [], 12.0, set()),  # it was only missing for a while
        (["b"], ["a"], 20.0, set()),
        (["b"], ["a"], 19.0 + GONE_S, set()),
        (["b"], ["a"], 20.0 + GONE_S, {"a"}),
        (["b"], [], 21.0 + GONE_S, set()),
        (["b"], ["a"], 22.0 + GONE_S, set()),  # a request that ends after its job was dropped
        (["b"], ["a"], 22.0 + 2 * GONE_S, {"a"}),
    ):
        assert gone.expired(present, counted, now) == expired, now


def version(uid, number, agent="policy"):
    return AdapterRef("team-a", "sums", uid, agent, number)


def test_every_version_counts_for_its_agent_from_its_load_until_its_slot_is_free_and_a_job_that_is_gone_leaves_nothing():
    seconds = SlotSeconds()
    for uid, number, agent, now in (
        ("a", 1, "policy", 10),
        ("a", 2, "policy", 12),
        ("a", 1, "critic", 12.5),
        ("b", 1, "policy", 13),
    ):
        seconds.begin(version(uid, number, agent), now)
    assert seconds.totals(14.0) == {"a": {"policy": 6.0, "critic": 1.5}, "b": {"policy": 1.0}}
    for now in (15.0, 99.0):
        seconds.end(version("a", 1).engine_name, now)
    assert seconds.totals(16.0) == {"a": {"policy": 9.0, "critic": 3.5}, "b": {"policy": 3.0}}
    seconds.end_all(17.0)
    assert seconds.totals(20.0) == {"a": {"policy": 10.0, "critic": 4.5}, "b": {"policy": 4.0}}
    seconds.begin(version("a", 2), 25.0)
    seconds.forget(["a"])
    seconds.end(version("a", 2).engine_name, 29.0)
    assert seconds.totals(30.0) == {"b": {"policy": 4.0}}
