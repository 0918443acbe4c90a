"""`EngineFailures`: which failures count together, when they are forgotten, and when an error says that the prompt is the cause."""

import numpy as np

from marlaas_worker.rollout.engine_failures import MAX_ENGINE_FAILURES, EngineFailures, Failures

PROMPT, OTHER = np.array([1, 2], np.int32), np.array([3], np.int32)


def test_requests_with_one_prompt_in_one_batch_count_once() -> None:
    failures = EngineFailures()
    for _ in range(4):
        failures.note("uid", PROMPT, Failures(), Failures(), "died")
    assert failures.of("uid", PROMPT, Failures()).number == 1
    assert failures.of("other", PROMPT, Failures()).number == failures.of("uid", OTHER, Failures()).number == 0


def test_a_request_that_fails_by_its_own_seed_counts_its_failures_although_others_with_its_prompt_are_generated() -> (
    None
):
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


def test_without_another_generation_the_prompt_may_not_be_the_cause_and_is_run_once_more() -> None:
    failures, own = EngineFailures(), Failures()
    for _ in range(MAX_ENGINE_FAILURES):
        own = failures.note("uid", PROMPT, failures.of("uid", PROMPT, own), own, "died")
    assert not failures.verdict("uid", PROMPT, own, "e.0").is_sure
    assert failures.of("uid", PROMPT, Failures()).number == MAX_ENGINE_FAILURES - 1
    failures.generated("uid", PROMPT)
    assert failures.of("uid", PROMPT, Failures()).number == 0


def test_jobs_that_are_gone_are_forgotten() -> None:
    failures = EngineFailures()
    for uid in ("gone", "here"):
        failures.note(uid, PROMPT, Failures(), Failures(), "died")
    failures.forget({"gone"})
    assert [failures.of(uid, PROMPT, Failures()).number for uid in ("gone", "here")] == [0, 1]
