"""`bench agents --only verifier`: its table by hand, its picture, and what it keeps of a run."""

import pytest
from bench import solver_verifier

EVALS = {"solver": [[0, 0.25], [5, 0.75], [10, 0.9375]], "verifier": [[0, 0.375], [5, 0.5], [10, 0.625]]}
FOUND = {
    "steps": 10,
    "seconds": 900.4,
    "evals": EVALS,
    "verdicts": [[0, 0.75], [5, 1.0], [10, 1.0]],
    "rewards": {"solver": [0.25, 0.5], "verifier": [0.375, 0.5]},
}


def test_a_row_has_both_agents_before_and_after_and_their_targets() -> None:
    row = solver_verifier.row(1, FOUND)
    assert row == [1, 10, "0.250", "0.938", "0.375", "0.625", "900", "met, also 0.9", "met"]
    assert len(row) == len(solver_verifier.HEADERS)


@pytest.mark.parametrize(
    ("agent", "before", "after", "told"),
    [
        ("solver", 0.75, 0.95, "missed"),
        ("solver", 0.25, 0.5, "met"),
        ("verifier", 0.5, 0.625, "missed"),
        ("verifier", 0.5, 0.75, "met, also 0.75"),
    ],
)
def test_a_target_is_a_gain_and_the_aim_an_end(agent: str, before: float, after: float, told: str) -> None:
    assert solver_verifier.told(agent, before, after) == told
