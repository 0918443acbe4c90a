"""Charges for the engine's time and tokens, and its failures with a prompt. Restarts are tested in service/test_engine_restarts.py."""

import numpy as np
import pytest

from marlaas_api.names import JobRef
from marlaas_worker.rollout.served_jobs import Failures, ServedJobs
from marlaas_worker.rollout.supervised_engine import (
    MAX_ENGINE_FAILURES,
    DecodeTime,
    EngineFailures,
    EngineMeter,
    recent_tokens,
)

JOB = JobRef("team-a", "sums", "uid")
PROMPT = np.array([1, 2], np.int32)


def test_shares_of_the_engines_time_add_up_to_the_time_it_was_busy():
    meter = EngineMeter()
    a = meter.enter(10.0)
    b = meter.enter(12.0)
    assert meter.leave(a, 16.0) == pytest.approx(2.0 + 2.0)
    assert meter.leave(b, 17.0) == pytest.approx(2.0 + 1.0)
    meter.advance(100.0)
    c = meter.enter(100.0)
    assert meter.leave(c, 101.0) == pytest.approx(1.0)
    assert meter.busy_s == pytest.approx(8.0)


def test_recent_tokens_count_half_after_a_minute_and_tell_the_tokens_of_unfinished_generations():
    recent = recent_tokens()
    recent.add({"a": 100}, 0.0)
    recent.add({"b": 8, "a": 10}, 60.0)
    assert recent.at(60.0) == {"a": 60.0, "b": 8.0}
    assert recent.at(300.0) == {"a": 3.75}
    decode = DecodeTime()
    assert decode.tokens_in(0.0, 100) == 1
    for _ in range(200):
        decode.note(5.0, 50)
        decode.note(0.0, 0)
    assert decode.tokens_in(0.95, 100) == 10
    assert decode.tokens_in(60.0, 100) == 100


def test_a_request_that_fails_by_its_own_seed_counts_its_failures_although_its_prompt_is_generated_by_others():
    failures, own, job = EngineFailures(), Failures(), ServedJobs().of(JOB)
    for number in range(MAX_ENGINE_FAILURES):
        known = failures.of(job, PROMPT, own)
        assert known.number == number
        own = failures.note(job, PROMPT, known, own, f"death {number}")
        failures.generated(job, PROMPT)
    found = failures.of(job, PROMPT, own)
    verdict = failures.verdict(job, PROMPT, found, "e.0")
    assert (found.number, verdict.is_sure) == (MAX_ENGINE_FAILURES, True)
    text = "the engine failed 3 times while it ran the prompt of turn e.0; last: death 2; change the prompt, or ask"
    assert str(verdict).startswith(text)


def test_without_another_generation_the_prompt_may_not_be_the_cause_and_is_run_once_more():
    failures, own, job = EngineFailures(), Failures(), ServedJobs().of(JOB)
    for _ in range(MAX_ENGINE_FAILURES):
        own = failures.note(job, PROMPT, failures.of(job, PROMPT, own), own, "died")
    assert not failures.verdict(job, PROMPT, own, "e.0").is_sure
    assert failures.of(job, PROMPT, Failures()).number == MAX_ENGINE_FAILURES - 1
    failures.generated(job, PROMPT)
    assert failures.of(job, PROMPT, Failures()).number == 0
