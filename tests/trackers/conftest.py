from collections.abc import Callable

import pytest
from tests.harness import a_step, identity, job_document

from marlaas_api.messages import EvalRecord, EvalSample, JobDocument, StepRecord


@pytest.fixture
def document() -> Callable[..., JobDocument]:
    """A job that tells these trackers."""
    return lambda *trackers: job_document("reverse", uid="uid-1", spec={"export": {"trackers": list(trackers)}})


@pytest.fixture
def steps(document) -> Callable[[int], list[StepRecord]]:
    told = {"faults": {"env": 1}, "metrics": {"entropy": 1.5, "loss": float("nan")}, "plays": {"data_digests": ["d1"]}}
    return lambda number: [a_step(document(), n, at=100.0 + n, reward_mean=0.25 * n, **told) for n in range(number)]


@pytest.fixture
def evaluation(document) -> Callable[[int], EvalRecord]:
    def build(done: int) -> EvalRecord:
        values = {"step": done, "version": done, "at": 99.5 + done, "reward_mean": 0.5, "num_episodes": 8}
        sample = EvalSample(index=3, prompt="reverse: ab", reply="ba", reward=1.0)
        return EvalRecord(**identity(document()), **values, metrics={"is right?": 1.0}, samples=(sample,))

    return build
