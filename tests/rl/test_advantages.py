import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlaas_worker.rl.advantages import Algorithm, advantages, has_signal

ALGORITHMS: tuple[Algorithm, ...] = ("grpo", "reinforce")
rewards_of_a_group = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


@pytest.mark.parametrize(
    ("algorithm", "rewards", "expected"),
    [
        ("grpo", [1.0, 0.0], [1.0, -1.0]),
        ("grpo", [1.0, 0.0, 0.0, 0.0], [math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)]),
        ("grpo", [2.0, 2.0, 2.0], [0.0, 0.0, 0.0]),
        ("reinforce", [1.0, 0.0], [1.0, -1.0]),
        ("reinforce", [1.0, 0.0, 0.0, 0.0], [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("reinforce", [3.0, 1.0, 2.0], [1.5, -1.5, 0.0]),
        ("reinforce", [2.0, 2.0, 2.0], [0.0, 0.0, 0.0]),
    ],
)
def test_advantages_are_the_ones_computed_by_hand(
    algorithm: Algorithm, rewards: list[float], expected: list[float]
) -> None:
    assert advantages(algorithm, rewards) == pytest.approx(expected, abs=1e-5)


@given(rewards=rewards_of_a_group, shift=st.floats(-5, 5))
def test_advantages_sum_to_zero_and_ignore_a_constant(rewards: list[float], shift: float) -> None:
    for algorithm in ALGORITHMS:
        plain = advantages(algorithm, rewards)
        shifted = advantages(algorithm, [reward + shift for reward in rewards])
        assert math.fsum(plain) == pytest.approx(0.0, abs=1e-6)
        if has_signal(rewards):
            assert shifted == pytest.approx(plain, abs=1e-3)


@given(rewards=rewards_of_a_group)
def test_a_group_has_signal_exactly_when_some_advantage_is_more_than_noise(rewards: list[float]) -> None:
    largest = max(abs(value) for value in advantages("reinforce", rewards))
    assert has_signal(rewards) == (max(rewards) - min(rewards) > 1e-6)
    assert largest > 0.5e-6 if has_signal(rewards) else largest <= 2e-6


def test_rewards_equal_but_for_rounding_are_no_signal() -> None:
    assert not has_signal([0.1 + 0.2, 0.3, 0.3])
    assert has_signal([0.3, 0.301])


@pytest.mark.parametrize("rewards", [[], [1.0], [1.0, math.nan], [0.0, math.inf]])
def test_what_cannot_be_compared_is_refused(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="rewards"):
        advantages("grpo", rewards)
    with pytest.raises(ValueError, match="rewards"):
        has_signal(rewards)


def test_advantages_need_no_torch() -> None:
    code = "import sys, marlaas_worker.rl.advantages; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
