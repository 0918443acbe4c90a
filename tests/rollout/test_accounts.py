"""Totals of jobs and tenants and when they are dropped; failures of loads, and of prompts under which the engine failed."""

import numpy as np
import pytest

from marlaas_api.blobs import BlobRefused
from marlaas_api.bus import BusRefused
from marlaas_api.errors import Permanent, Retryable
from marlaas_api.names import AdapterRef
from marlaas_worker.rollout.accounts import GONE_S, GoneJobs
from marlaas_worker.rollout.engine_failures import MAX_ENGINE_FAILURES, EngineFailures, Failures
from marlaas_worker.rollout.engine_meter import DecodeTime, EngineMeter, recent_tokens
from marlaas_worker.rollout.load_retries import FIRST_WAIT_S, LONGEST_WAIT_S, Retries
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


PROMPT = np.array([1, 2], np.int32)


@pytest.mark.parametrize(
    "error",
    [Retryable("away"), BlobRefused("expired"), BusRefused("no permission"), RuntimeError("no thread"), OSError()],
)
def test_a_load_that_may_succeed_later_is_tried_again_ever_more_rarely(error):
    retries = Retries()
    waits = [retries.failed("v1", error, 100.0).retry_at - 100.0 for _ in range(12)]
    assert waits[:3] == pytest.approx([FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S])
    assert waits[-1] == pytest.approx(LONGEST_WAIT_S)
    assert [retries.may_try("v1", now) for now in (109.0, 110.1)] == [False, True]
    assert retries.next_in_s(["v0", "v1"], 109.0) == pytest.approx(1.0)
    retries.succeeded("v1")
    assert retries.next_in_s(["v1"], 109.0) is None


@pytest.mark.parametrize("error", [Permanent("corrupt"), KeyError("adapter_model.safetensors")])
def test_a_load_that_never_succeeds_is_refused_until_everything_begins_anew(error):
    retries = Retries()
    assert retries.failed("v1", error, 0.0).retry_at is None
    assert (retries.may_try("v1", 1e9), retries.next_in_s(["v1"], 0.0)) == (False, None)
    retries.clear()
    assert retries.may_try("v1", 0.0)


def test_a_request_that_fails_by_its_own_seed_counts_its_failures_although_its_prompt_is_generated_by_others():
    failures, own = EngineFailures(), Failures()
    for number in range(MAX_ENGINE_FAILURES):
        known = failures.of("uid", PROMPT, own)
        assert known.number == number
        own = failures.note("uid", PROMPT, known, own, f"death {number}")
        failures.generated("uid", PROMPT)
    found = failures.of("uid", PROMPT, own)
    verdict = failures.verdict("uid", PROMPT, found, "e.0")
    assert (found.number, verdict.is_sure) == (MAX_ENGINE_FAILURES, True)
    text = "the engine failed 3 times while it ran the prompt of turn e.0; last: death 2; change the prompt, or ask"
    assert str(verdict).startswith(text)


def test_without_another_generation_the_prompt_may_not_be_the_cause_and_is_run_once_more():
    failures, own = EngineFailures(), Failures()
    for _ in range(MAX_ENGINE_FAILURES):
        own = failures.note("uid", PROMPT, failures.of("uid", PROMPT, own), own, "died")
    assert not failures.verdict("uid", PROMPT, own, "e.0").is_sure
    assert failures.of("uid", PROMPT, Failures()).number == MAX_ENGINE_FAILURES - 1
    failures.generated("uid", PROMPT)
    assert failures.of("uid", PROMPT, Failures()).number == 0
