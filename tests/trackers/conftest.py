from collections.abc import Callable

import pytest

from marlaas_api.documents import job_spec
from marlaas_api.kinds import RLJobSpec
from marlaas_api.messages import EvalRecord, JobDocument, StepOutcome, StepRecord

BODY = {"namespace": "team-a", "job": "reverse", "uid": "uid-1"}


@pytest.fixture
def document() -> Callable[..., JobDocument]:
    """A job that tells these trackers."""

    def build(*trackers: str) -> JobDocument:
        content = {"poolRef": {"name": "tiny"}, "environment": {"name": "reverse"}, "training": {"steps": 3}}
        spec = RLJobSpec.model_validate({**content, "export": {"trackers": list(trackers)}})
        return JobDocument(**BODY, pool="tiny", tenant="team-a", spec=job_spec(spec))

    return build


@pytest.fixture
def steps() -> Callable[[int], list[StepRecord]]:
    """The first n steps."""

    def build(number: int) -> list[StepRecord]:
        values = {"wall_s": 1.0, "reward_std": 0.2, "num_groups": 8, "num_episodes": 64, "faults": {"env": 1}}
        rest = {"outcome": StepOutcome.COMMITTED, "metrics": {"entropy": 1.5, "loss": float("nan")}}
        own = [
            {"step": n, "version": n + 1, "at": 100.0 + n, "reward_mean": 0.25 * n, "indices": (n,)}
            for n in range(number)
        ]
        return [StepRecord(**BODY, **values, **rest, **one) for one in own]

    return build


@pytest.fixture
def evaluation() -> Callable[[int], EvalRecord]:
    def build(done: int) -> EvalRecord:
        values = {"step": done, "version": done, "at": 99.5 + done, "reward_mean": 0.5, "num_episodes": 8}
        return EvalRecord(**BODY, **values, metrics={"is right?": 1.0})

    return build
