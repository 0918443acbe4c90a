"""`bench agents`: which adapters agents begin with, and the tables of results computed by hand."""

from pathlib import Path

import pytest
from bench import agents
from bench.runs import changed

FOUND = {
    "steps": 40,
    "seconds": 400.4,
    "evals": [[0, 0.125], [20, 0.5], [40, 0.875]],
    "metrics": {"called": 1.0, "computed": 0.96875},
    "rewards": [0.25, 0.5],
}


def test_swapped_agents_begin_with_each_others_adapters() -> None:
    _, same, swapped = agents.swapped(changed(agents.EXAMPLE, None, None), Path("/out"))
    assert [job["metadata"]["name"] for job in (same, swapped)] == ["same", "swapped"]
    begins = [{one["name"]: one["initFrom"]["path"] for one in job["spec"]["agents"]} for job in (same, swapped)]
    assert begins == [
        {"caller": "/out/caller", "reader": "/out/reader"},
        {"caller": "/out/reader", "reader": "/out/caller"},
    ]


def test_an_evaluation_differs_from_the_relay_in_nothing_that_changes_its_tasks() -> None:
    pool, relay = changed(agents.EXAMPLE, None, None)
    same_pool, same, swapped = agents.swapped([pool, relay], Path("/out"))
    assert same_pool == pool
    for job in (same, swapped):
        assert job["spec"]["environment"] == relay["spec"]["environment"]
        assert job["spec"]["evaluation"] == relay["spec"]["evaluation"]
        assert job["spec"]["rollout"] == relay["spec"]["rollout"] | {"groupSize": 2}
        assert [one["adapter"] for one in job["spec"]["agents"]] == [one["adapter"] for one in relay["spec"]["agents"]]
    assert relay["spec"]["rollout"]["groupSize"] == 8, "the relay's own manifest is unchanged"


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [(0.125, 0.84, "missed"), (0.36, 0.97, "missed"), (0.35, 0.85, "met"), (0.1, 0.95, "met, also 0.95")],
)
def test_a_row_says_whether_the_target_is_met(before: float, after: float, told: str) -> None:
    row = agents.relay_row(1, FOUND | {"evals": [[0, before], [40, after]]})
    assert row == [1, 40, f"{before:.3f}", f"{after:.3f}", "1.000", "0.969", "400", told]
    assert len(row) == len(agents.HEADERS["relay"])


def test_a_row_compares_the_same_adapters_with_the_swapped_ones() -> None:
    assert agents.swapped_row(2, FOUND, {"same": 0.9, "swapped": 0.0625}) == [2, "0.875", "0.900", "0.062", "met"]
    row = agents.swapped_row(2, FOUND, {"same": 0.9, "swapped": 0.5})
    assert row[-1] == "missed"
    assert len(row) == len(agents.HEADERS["swapped"])
