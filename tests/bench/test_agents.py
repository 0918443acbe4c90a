"""`bench agents`: which adapters agents begin with, and the tables of results computed by hand."""

import json
from pathlib import Path

import pytest
import yaml
from bench import agents
from bench.runs import Run, changed, finished, kept

from marlaas.manifest import load

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


def test_a_job_of_frozen_agents_only_is_refused_so_one_is_trainable(tmp_path: Path) -> None:
    _, same, _ = agents.swapped(changed(agents.EXAMPLE, None, None), tmp_path)
    assert [one["trainable"] for one in same["spec"]["agents"]] == [True, False]
    for agent in same["spec"]["agents"]:
        agent["trainable"] = False
    path = tmp_path / "frozen.yaml"
    path.write_text(yaml.safe_dump(same))
    with pytest.raises(Exception, match="set trainable: true for at least one"):
        load([path], runnable=False)


def test_options_replace_the_examples_steps_and_rate() -> None:
    (_, example), (_, other) = changed(agents.EXAMPLE, None, None), changed(agents.EXAMPLE, 60, 2e-3)
    training, replaced = example["spec"]["training"], other["spec"]["training"]
    assert (replaced["steps"], replaced["optimizer"]["learningRate"]) == (60, 2e-3)
    assert replaced | {"steps": training["steps"], "optimizer": training["optimizer"]} == training


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


def test_a_run_that_was_stopped_is_no_result() -> None:
    jobs = {"team-a/relay": {"phase": "Running", "steps": 35}}
    stopped = Run(Path("/run"), 9.0, {"jobs": jobs}, {}, {}, {})
    with pytest.raises(RuntimeError, match="team-a/relay is Running after 35 steps; the run's folder is /run"):
        finished(stopped)
    jobs["team-a/relay"]["phase"] = "Succeeded"
    assert finished(stopped) is stopped


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    agents.draw({0: FOUND, 1: FOUND}, tmp_path / "agents.png")
    assert (tmp_path / "agents.png").read_bytes()[:4] == b"\x89PNG"


def test_stored_results_count_only_for_what_they_were_measured_on(tmp_path: Path) -> None:
    path, values = tmp_path / "folder" / "one.json", iter((1, 2))
    first = kept(path, {"steps": 3}, lambda: {"value": next(values)})
    assert kept(path, {"steps": 3}, lambda: {"value": next(values)}) == first == {"value": 1}
    assert kept(path, {"steps": 4}, lambda: {"value": next(values)}) == {"value": 2}
    assert json.loads(path.read_text())["value"] == 2
