"""`bench agents --only verifier`: its table by hand, its picture, and what it keeps of a run."""

from pathlib import Path

import pytest
from bench import solver_verifier
from bench.runs import Run, documents

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


def test_a_run_is_kept_by_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "default/solver-verifier"
    steps = [{"agents": {"solver": {"reward_mean": 0.25}, "verifier": {"reward_mean": 0.5}}}]
    metrics = {"solved": 0.25, "judged": 0.375, "verdicts": 0.75}
    result = Run(
        tmp_path,
        9.0,
        {"jobs": {name: {"phase": "Succeeded", "steps": 1}}},
        {},
        {name: steps},
        {name: [{"step": 0, "metrics": metrics}]},
    )
    monkeypatch.setattr(solver_verifier, "run", lambda manifests, seed: result)
    found = solver_verifier.train(documents("agents/solver-verifier.yaml"), 0, tmp_path)
    assert found["evals"] == {"solver": [[0, 0.25]], "verifier": [[0, 0.375]]}
    assert (found["rewards"], found["verdicts"]) == ({"solver": [0.25], "verifier": [0.5]}, [[0, 0.75]])
    assert (tmp_path / "verifier-0.json").exists()


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    solver_verifier.draw({0: FOUND, 1: FOUND}, tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes()[:4] == b"\x89PNG"
