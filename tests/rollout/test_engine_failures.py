"""What is remembered of failures: of loads, and of prompts under which the engine failed."""

import numpy as np
import pytest

from marlaas_api.blobs import BlobRefused
from marlaas_api.bus import BusRefused
from marlaas_api.errors import Permanent, Retryable
from marlaas_worker.rollout.engine_failures import MAX_ENGINE_FAILURES, EngineFailures, Failures
from marlaas_worker.rollout.load_retries import FIRST_WAIT_S, LONGEST_WAIT_S, Retries

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
