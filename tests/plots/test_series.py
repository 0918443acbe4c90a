import math

import pytest

from marlaas.plots.series import (
    EVAL,
    GAP,
    KL,
    LENGTH,
    PANELS,
    REWARD,
    STALENESS,
    Curve,
    job_curves,
    reward_curve,
    reward_range,
)
from marlaas_api.documents import job_spec
from marlaas_api.kinds import RLJobSpec
from marlaas_api.messages import EvalRecord, JobDocument, StepOutcome, StepRecord

BODY = {"namespace": "a", "job": "one", "uid": "u"}


def document(**training: object) -> JobDocument:
    spec = {"poolRef": {"name": "tiny"}, "environment": {"name": "reverse"}, "rollout": {"groupSize": 4}}
    spec["training"] = {"steps": 3, **training}
    return JobDocument(**BODY, pool="tiny", tenant="a", spec=job_spec(RLJobSpec.model_validate(spec)))


def step(number: int, mean: float = 0.5, std: float = 0.5, **fields: object) -> StepRecord:
    figures = {"at": 10.0 * (number + 1), "wall_s": 10.0, "reward_mean": mean, "reward_std": std, "indices": (number,)}
    counts = {"version": number + 1, "num_groups": 2, "num_episodes": 16, "outcome": StepOutcome.COMMITTED}
    return StepRecord.model_validate({**BODY, "step": number, **figures, **counts, **fields})


def evaluation(done: int, mean: float) -> EvalRecord:
    return EvalRecord(**BODY, step=done, version=done, at=1.0, reward_mean=mean, num_episodes=8)


def test_every_panel_has_its_curve_at_the_steps_that_were_finished():
    metrics = {"tokens": 40.0, "entropy": 1.0, "behaviour_kl": 0.1, "kl": 0.2, "logprob_gap": 0.01}
    steps = [step(0, metrics=metrics, staleness_mean=0.5), step(1, num_groups=0, outcome=StepOutcome.NO_OP)]
    curves = job_curves("one", document(), steps, [evaluation(0, 0.2), evaluation(2, 0.8)]).curves
    assert set(curves) == set(PANELS)
    assert curves[REWARD].points == ((1.0, 0.5), (2.0, 0.5))
    assert curves[EVAL].points == ((0.0, 0.2), (2.0, 0.8))
    assert curves[LENGTH].ys[0] == 40.0 / 8
    assert curves[GAP].ys[0] == 0.01
    assert (curves[STALENESS].ys[0], math.isnan(curves[STALENESS].ys[1])) == (0.5, True)
    assert all(math.isnan(curves[panel].ys[1]) for panel in (LENGTH, GAP, KL))


@pytest.mark.parametrize(("coefficient", "value"), [(0.0, 0.1), (0.5, 0.2)])
def test_kl_is_towards_version_0_where_the_job_pays_for_it(coefficient, value):
    steps = [step(0, metrics={"behaviour_kl": 0.1, "kl": 0.2})]
    assert job_curves("one", document(kl={"coefficient": coefficient}), steps, []).curves[KL].ys == [value]


def test_the_band_of_the_reward_is_its_standard_error_and_stays_within_the_rewards():
    low, high = reward_curve([step(0, 0.5, 0.4), step(1, 0.99, 0.099)]).edges()
    assert low[0] == pytest.approx(0.5 - 0.4 / 4)
    assert high == pytest.approx([0.6, 1.0])


@pytest.mark.parametrize(
    ("steps", "bounds"),
    [
        ([step(0, 0.5, 0.5), step(1, 1.0, 0.0)], (0.0, 1.0)),
        ([step(0, 0.5, 0.6)], (-math.inf, math.inf)),
        ([step(0, 0.5, 0.1), step(1, -0.1, 0.1)], (-math.inf, math.inf)),
    ],
)
def test_rewards_are_thought_to_be_shares_only_where_every_step_could_come_from_shares(steps, bounds):
    assert reward_range(steps) == bounds


def test_a_curve_without_points_has_no_edges():
    assert Curve(()).edges() == ([], [])
