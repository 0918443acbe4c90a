import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tables import rows

from marlaas_worker.rl.advantages import (
    Estimator,
    advantages,
    by_state,
    by_turn,
    has_signal,
    has_turn_signal,
    overlong_penalty,
    turn_returns,
)

ESTIMATORS: tuple[Estimator, ...] = ("standardised", "centred", "leave-one-out")
rewards_of_a_group = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


@pytest.mark.parametrize(("estimator", "rewards", "expected"), rows(__file__, "advantages"))
def test_advantages_are_the_ones_computed_by_hand(estimator, rewards, expected):
    assert advantages(estimator, rewards) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("discount", "rewards", "totals", "states", "expected"), rows(__file__, "credit"))
def test_advantages_of_turns_are_the_ones_computed_by_hand(discount, rewards, totals, states, expected):
    returns = [turn_returns(own, total, discount) for own, total in zip(rewards, totals, strict=True)]
    found = by_turn("centred", returns) if states is None else by_state("centred", returns, states)
    assert found == [pytest.approx(own) for own in expected]
    assert states or has_turn_signal(returns, by_state=False) == any(value for own in expected for value in own)


@given(rewards=rewards_of_a_group, shift=st.floats(-5, 5))
def test_advantages_sum_to_zero_and_ignore_a_constant(rewards, shift):
    for estimator in ESTIMATORS:
        plain = advantages(estimator, rewards)
        shifted = advantages(estimator, [reward + shift for reward in rewards])
        assert math.fsum(plain) == pytest.approx(0.0, abs=1e-6)
        if has_signal(rewards):
            assert shifted == pytest.approx(plain, abs=1e-3)


@given(rewards=rewards_of_a_group)
def test_a_group_has_signal_exactly_when_some_advantage_is_more_than_noise(rewards):
    largest = max(abs(value) for value in advantages("leave-one-out", rewards))
    assert has_signal(rewards) == (max(rewards) - min(rewards) > 1e-6)
    assert largest > 0.5e-6 if has_signal(rewards) else largest <= 2e-6
    assert has_signal([0.3, 0.301])
    assert not has_signal([0.1 + 0.2, 0.3, 0.3]), "rewards that are equal but for rounding"


@pytest.mark.parametrize("rewards", [[], [1.0], [1.0, math.nan], [0.0, math.inf]])
def test_what_cannot_be_compared_is_refused(rewards):
    with pytest.raises(ValueError, match="rewards"):
        advantages("standardised", rewards)
    with pytest.raises(ValueError, match="rewards"):
        has_signal(rewards)


def test_the_overlong_penalty_is_the_one_computed_by_hand_and_stays_within_one():
    for num_tokens, penalty in {1: 0.0, 80: 0.0, 81: -0.05, 90: -0.5, 100: -1.0, 120: -1.0}.items():
        assert overlong_penalty(num_tokens, max_tokens=100, last=20) == pytest.approx(penalty)
        assert overlong_penalty(num_tokens, max_tokens=100, last=0) == 0.0
    assert [overlong_penalty(count, max_tokens=8, last=8) for count in (0, 4, 8)] == [0.0, -0.5, -1.0]
    assert overlong_penalty(8, max_tokens=8, last=100) == -1.0


def test_advantages_and_the_table_need_no_torch():
    code = "import sys, marlaas_worker.rl.algorithms; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
