"""The learning rate of every step, worked out by hand, AdamW's epsilon, and steps whose gradient is not finite."""

import math

import pytest
import torch
from tests.trainer.test_learner import learner_of, segments, step

from marlaas_api.messages.job_spec import OptimizerSettings
from marlaas_worker.trainer.learner import Learner
from marlaas_worker.trainer.optimizer import (
    GradientInvalid,
    TrainingState,
    learning_rate,
    read_state,
    update,
    write_state,
)
from marlaas_worker.trainer.rows import Segment

HALF_ROOT_2 = math.sqrt(2) / 2


@pytest.mark.parametrize(
    ("spec", "num_steps", "rates"),
    [
        ({}, 4, [1, 1, 1, 1]),
        ({"warmup_steps": 4}, 6, [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"schedule": "linear"}, 4, [1, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "warmup_steps": 2}, 6, [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ({"min_learning_rate_ratio": 0.2}, 2, [1, 1]),  # an agent without decay, in a job that has a floor
        ({"schedule": "linear", "min_learning_rate_ratio": 0.2}, 4, [1, 0.8, 0.6, 0.4]),
        ({"schedule": "cosine"}, 4, [1, 0.5 + HALF_ROOT_2 / 2, 0.5, 0.5 - HALF_ROOT_2 / 2]),
        ({"schedule": "cosine", "warmup_steps": 1}, 4, [1, 1, 0.75, 0.25]),  # cos(60°) = 1/2
        ({"schedule": "cosine", "min_learning_rate_ratio": 0.5, "warmup_steps": 1}, 4, [1, 1, 0.875, 0.625]),
        ({"schedule": "linear", "warmup_steps": 9}, 3, [1 / 9, 2 / 9, 3 / 9]),  # a job that ends before its peak
    ],
)
def test_a_step_has_the_rate_of_its_schedule(spec, num_steps, rates):
    optimizer = OptimizerSettings.model_validate({"learning_rate": 1.0, **spec})
    assert [learning_rate(optimizer, number, num_steps) for number in range(num_steps)] == pytest.approx(rates)


def test_a_job_that_is_given_more_steps_goes_on_at_the_rate_of_the_longer_job():
    optimizer = OptimizerSettings(learning_rate=1.0, schedule="linear")
    assert [learning_rate(optimizer, number, 4) for number in (2, 3)] == [0.5, 0.25]
    assert [learning_rate(optimizer, number, 8) for number in (4, 5)] == [0.5, 0.375]
    assert learning_rate(optimizer, 8, 8) == learning_rate(optimizer, 9, 8) == 0.0


def test_epsilon_is_added_to_the_root_of_the_second_moment():
    weights, gradients = torch.nn.Parameter(torch.zeros(3)), torch.tensor([3.0, -1.0, 0.5])
    weights.grad = 2 * gradients
    optimizer = torch.optim.AdamW([weights], eps=0.5, weight_decay=0.0)
    assert update(optimizer, 2, 0.1, 1e9) == pytest.approx(math.sqrt(9 + 1 + 0.25))
    # bias-corrected moments of a first step are g and g^2: the step is rate g / (|g| + epsilon)
    assert weights.tolist() == pytest.approx([-0.1 * 3 / 3.5, 0.1 * 1 / 1.5, -0.1 * 0.5 / 1.0])


@pytest.mark.parametrize(("epsilon", "largest"), [(1e-8, 2.5e-3), (1.0, 1.25e-3)])
def test_a_step_is_taken_at_the_rate_that_its_metrics_record_and_with_the_jobs_epsilon(base, epsilon, largest):
    """AdamW's first step is rate |g| / (|g| + epsilon), and the gradient's norm is clipped to 1."""
    learner = learner_of(base, steps=4, optimizer={"learningRate": 1e-2, "schedule": "linear", "epsilon": epsilon})
    learner.begin()
    before = learner.weights()
    assert step(learner, segments(0), 3)["learning_rate"] == pytest.approx(2.5e-3)
    moved = max((value - before[name]).abs().max().item() for name, value in learner.weights().items())
    assert moved == pytest.approx(largest, rel=1e-3) if epsilon < 1 else moved < largest


# gradients that are not finite --------------------------------------------------------------------------------------


def broken(value: float = float("nan")) -> list[Segment]:
    return [Segment(part.ids, part.generated, part.behaviour, 0, value) for part in segments(0)]


def everything(learner: Learner) -> bytes:
    """Weights, moments and counts of updates; not the counts of skipped steps."""
    state = learner.state(0, ())
    kept = TrainingState(
        num_updates=state.num_updates, first_moments=state.first_moments, second_moments=state.second_moments
    )
    return write_state(kept) + b"".join(value.numpy().tobytes() for value in learner.weights().values())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3e38])
def test_a_step_whose_gradient_is_not_finite_changes_nothing_and_leaves_no_trace(base, value):
    disturbed, straight = learner_of(base), learner_of(base)
    for learner in (disturbed, straight):
        learner.begin()
        step(learner, segments(1), 0)
    before = everything(disturbed)
    metrics = step(disturbed, broken(value), 1)
    assert metrics["skipped_update"] == 1.0
    assert "grad_norm" not in metrics
    assert all(math.isfinite(each) for each in metrics.values())
    assert everything(disturbed) == before
    assert [step(learner, segments(2), 2)["skipped_update"] for learner in (disturbed, straight)] == [0.0, 0.0]
    assert everything(disturbed) == everything(straight)


def test_only_steps_in_a_row_without_a_finite_gradient_stop_the_training(base):
    learner = learner_of(base)
    learner.begin()
    for number in range(8):
        step(learner, segments(0) if number in (2, 5) else broken(), number)
    with pytest.raises(
        GradientInvalid, match=r"policy is not finite \(its norm is nan\) in 3 steps in a row, the last of them step 8"
    ):
        step(learner, broken(), 8)


def test_a_state_of_an_earlier_release_counts_nothing_and_lowers_nothing(base):
    data = write_state(TrainingState(step=4, token_budget=32, num_skipped=2))
    written = b'"num_updates": 0, "token_budget": 32, "num_skipped": 2'
    assert written in data
    earlier = read_state(data.replace(written, b'"num_updates": 0' + b" " * (len(written) - 16)))
    assert (earlier.step, earlier.token_budget, earlier.num_skipped) == (4, 0, 0)
    learner = learner_of(base)
    learner.restore({}, earlier)
    assert learner.token_budget == 64
