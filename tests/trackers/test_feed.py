from dataclasses import dataclass, field
from pathlib import Path

import pytest

from marlaas.trackers.feed import DeliveryLedger, TrackerFeed, TrackerPaths
from marlaas.trackers.seam import End, MemoryTracker, require, rows
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import AgentStep


@dataclass
class Office:
    """Desks of successive processes over one folder, and what their trackers heard."""

    folder: Path
    notes: list[str] = field(default_factory=list)
    tracker: MemoryTracker = field(default_factory=MemoryTracker)

    def feed(self) -> TrackerFeed:
        place = TrackerPaths(self.folder / ".state", lambda job: self.folder / job.job)
        return TrackerFeed(place, self.notes.append, lambda name, document, folder: self.tracker)

    def heard(self) -> list[tuple[int, str]]:
        return [(number, row.key) for number, row in self.tracker.rows]


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


def test_rows_are_in_the_order_of_things_and_without_what_is_no_number(steps, evaluation):
    found = rows(steps(2), [evaluation(0), evaluation(2)])
    assert [(row.key, row.finished) for row in found] == [("eval 0", 0), ("step 0", 1), ("step 1", 2), ("eval 2", 2)]
    assert found[2].values["reward/train"] == 0.25
    assert found[2].values["train/entropy"] == 1.5
    assert found[2].values["faults/env"] == 1.0
    assert "train/loss" not in found[2].values
    assert found[0].values == {"reward/held_out": 0.5, "held_out/is right_": 1.0}


def test_rows_of_several_agents_have_each_ones_reward_version_and_metrics_of_the_trainer(steps, evaluation):
    (step,) = steps(1)
    parts = {"solver": AgentStep(outcome="committed", version=3, reward_mean=0.75)}
    parts["judge"] = AgentStep(outcome="no_op", version=0)
    held_out = evaluation(0).model_copy(update={"rewards": {"solver": 0.5, "judge": 0.25}})
    metrics = {"solver/entropy": 1.5, "solver/loss": 0.25, "judge/entropy": 0.5, "judge/loss": float("nan")}
    first, second = rows([step.model_copy(update={"agents": parts, "metrics": metrics})], [held_out])
    assert (first.values["reward/held_out/solver"], first.values["reward/held_out/judge"]) == (0.5, 0.25)
    found = {name: value for name, value in second.values.items() if name.endswith(("/solver", "/judge"))}
    assert found == {"reward/train/solver": 0.75, "step/version/solver": 3.0, "step/version/judge": 0.0}
    trained = {name: value for name, value in second.values.items() if name.startswith("train/")}
    assert trained == {"train/solver/entropy": 1.5, "train/solver/loss": 0.25, "train/judge/entropy": 0.5}


async def test_every_record_is_told_once_also_over_a_restart(office, document, steps, evaluation):
    job = document("tensorboard")
    first = office.feed()
    first.add(job, steps(1), [evaluation(0)])
    first.add(job, steps(2), [evaluation(0)])
    await first.close([job], {})
    second = office.feed()
    second.add(job, steps(3), [evaluation(0), evaluation(3)])
    await second.close([job], {job.uid: End.SUCCEEDED})
    assert office.heard() == [(0, "eval 0"), (1, "step 0"), (2, "step 1"), (3, "step 2"), (4, "eval 3")]
    assert office.tracker.closed == [None, End.SUCCEEDED]
    assert office.notes == ["team-a/reverse: memory"] * 2


async def test_a_tracker_that_fails_is_named_and_told_no_more_and_the_others_go_on(office, document, steps):
    office.tracker.fails_at = 1
    other = MemoryTracker()
    feed = office.feed()
    feed.open_tracker = lambda name, document, folder: office.tracker if name == "wandb" else other
    job = document("wandb", "mlflow")
    feed.add(job, steps(3), [])
    feed.add(job, steps(3), [])
    await feed.close([job], {job.uid: End.SUCCEEDED})
    assert [row.key for _, row in office.tracker.rows] == ["step 0"]
    assert [row.key for _, row in other.rows] == ["step 0", "step 1", "step 2"]
    failed = "tracker wandb failed and gets no more rows in this run: OSError: no route to host"
    assert f"team-a/reverse: {failed}" in office.notes
    assert office.tracker.closed == []


async def test_a_job_without_trackers_and_a_finished_run_that_is_looked_at_again_open_none(office, document, steps):
    feed = office.feed()
    feed.add(document(), steps(1), [])
    await feed.close([document()], {})
    assert not (office.folder / ".state").exists()
    job = document("wandb")
    for _ in range(2):
        feed = office.feed()
        feed.add(job, steps(1), [])
        await feed.close([job], {job.uid: End.SUCCEEDED})
    assert office.heard() == [(0, "step 0")]
    assert len(office.notes) == 1


def test_a_line_that_a_kill_cut_off_matches_nothing(tmp_path):
    path = tmp_path / "one.told"
    DeliveryLedger(path).mark("mlflow", "step 1")
    path.write_text(path.read_text() + "mlflow step 1")
    ledger = DeliveryLedger(path)
    ledger.mark("mlflow", "step 12")
    assert DeliveryLedger(path).delivered("mlflow") == {"step 1", "step 12"}
    assert DeliveryLedger(path).delivered("wandb") == set()


def test_a_library_that_is_missing_is_told_with_what_to_install(document, monkeypatch):
    monkeypatch.setattr("marlaas.trackers.seam.find_spec", lambda name: None)
    require([document()])
    told = r"asks for mlflow, and mlflow-skinny is not installed: pip install 'marlaas\["
    with pytest.raises(InvalidInput, match=told):
        require([document(), document("mlflow")])
