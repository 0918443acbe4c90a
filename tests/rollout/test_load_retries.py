"""Failed loads: which are tried again, and when."""

import pytest

from marlaas_api.blobs import BlobRefused
from marlaas_api.bus import BusRefused
from marlaas_api.errors import Permanent, Retryable
from marlaas_worker.rollout.load_retries import FIRST_WAIT_S, LONGEST_WAIT_S, Retries


@pytest.mark.parametrize(
    "error",
    [Retryable("away"), BlobRefused("expired"), BusRefused("no permission"), RuntimeError("no thread"), OSError()],
)
def test_what_may_succeed_later_is_tried_again_ever_more_rarely(error):
    retries = Retries()
    failures = [retries.failed("v1", error, 100.0) for _ in range(12)]
    waits = [failure.retry_at - 100.0 for failure in failures]
    assert waits[:3] == pytest.approx([FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S])
    assert waits[-1] == pytest.approx(LONGEST_WAIT_S)
    assert not retries.may_try("v1", 109.0)
    assert retries.may_try("v1", 110.1)
    assert retries.next_in_s(["v0", "v1"], 109.0) == pytest.approx(1.0)
    retries.succeeded("v1")
    assert retries.next_in_s(["v1"], 109.0) is None


@pytest.mark.parametrize("error", [Permanent("corrupt"), KeyError("adapter_model.safetensors")])
def test_what_never_succeeds_is_refused_until_everything_begins_anew(error):
    retries = Retries()
    assert retries.failed("v1", error, 0.0).retry_at is None
    assert not retries.may_try("v1", 1e9)
    assert retries.next_in_s(["v1"], 0.0) is None
    retries.clear()
    assert retries.may_try("v1", 0.0)
