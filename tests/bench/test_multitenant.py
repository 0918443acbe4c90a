"""Figures of `bench multitenant` against numbers computed by hand from raw events as a run writes them."""

import json
from pathlib import Path

import pytest
from bench import multitenant, multitenant_figures, soak
from bench.multitenant_workload import MODES, Workload, manifests

from marlaas.episodes.record import EpisodeRecord, TurnRecord
from marlaas_api.messages import StopReason
from marlaas_api.names import Split

BEGIN = 1000.0


def turn(end: float, engine_s: float, queue_s: float = 0.0, tokens: int = 2) -> TurnRecord:
    return TurnRecord(
        agent="policy",
        turn=0,
        version=0,
        append="x",
        text="y",
        stop_reason=StopReason.STOP,
        prompt_ids=(1,) * 3,
        output_ids=(1,) * tokens,
        engine_s=engine_s,
        queue_s=queue_s,
        at=BEGIN + end,
    )


def write_job(folder: Path, name: str, steps: list[float], turns: list[TurnRecord]) -> None:
    job = folder / "run" / name
    job.mkdir(parents=True)
    (job / "steps.jsonl").write_text("".join(json.dumps({"at": BEGIN + at}) + "\n" for at in steps))
    (job / "evals.jsonl").write_text(json.dumps({"reward_mean": 0.5}) + "\n")
    episodes = [
        EpisodeRecord(
            episode=f"e{number}", group=f"g{number}", split=Split.TRAIN, index=number, member=0, at=one.at, turns=(one,)
        )
        for number, one in enumerate(turns)
    ]
    (job / "episodes.jsonl").write_text("".join(f"{one.model_dump_json(exclude_defaults=True)}\n" for one in episodes))


@pytest.fixture
def events(tmp_path: Path) -> multitenant_figures.Events:
    """Two jobs: from 0 to 10 s with two steps, and from 2 to 6 s with one. The engine computes for 5 of the 10 seconds."""
    write_job(tmp_path, "team-0/job-00", [5.0, 10.0], [turn(2.0, engine_s=1.0, queue_s=1.0), turn(9.0, engine_s=3.0)])
    write_job(tmp_path, "team-1/job-01", [6.0], [turn(3.0, engine_s=1.0), turn(2.0, 0.0, tokens=7)])
    usage = [
        {"at": BEGIN - 1, "cpu_s": {"rollout": 20.0}},
        {"at": BEGIN + 4, "cpu_s": {"rollout": 22.0, "sandbox": 1.0}, "pss_bytes": {"rollout": 5}},
        {"at": BEGIN + 10, "cpu_s": {"rollout": 23.0, "sandbox": 3.0}, "pss_bytes": {"rollout": 4}},
        {"at": BEGIN + 11, "cpu_s": {"rollout": 99.0, "sandbox": 9.0}},
    ]
    (tmp_path / "usage.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in usage))
    return multitenant_figures.load(tmp_path)


def test_rates_count_from_the_first_turn_to_the_last_step(events: multitenant_figures.Events) -> None:
    assert multitenant_figures.rate_together(events) == pytest.approx(3 / 10)
    assert multitenant_figures.rate_one_by_one(events) == pytest.approx(3 / (10 + 4))
    assert multitenant_figures.first_results_s(events) == pytest.approx([5.0, 6.0])


def test_processor_time_is_that_between_first_turn_and_last_step(events: multitenant_figures.Events) -> None:
    assert multitenant_figures.cpu_s(events) == {"rollout": 3.0, "sandbox": 3.0}
    assert multitenant_figures.start_cpu_s(events) == {"rollout": 20.0}
    assert multitenant_figures.memory_bytes(events) == {"rollout": 5}


def test_the_bound_is_the_jobs_own_pace_or_the_processor(events: multitenant_figures.Events) -> None:
    assert multitenant_figures.bound(events, num_jobs=8, rate_of_one=0.1, cores=2) == pytest.approx(0.8)
    assert multitenant_figures.bound(events, num_jobs=32, rate_of_one=0.1, cores=2) == pytest.approx(2 * 3 / 6)


def test_the_engines_share_does_not_count_turns_twice(events: multitenant_figures.Events) -> None:
    assert multitenant_figures.busy_share(events) == pytest.approx(5 / 10)
    assert multitenant_figures.occupancy(events) == pytest.approx(5 / 5)


def test_service_by_window(events: multitenant_figures.Events) -> None:
    assert multitenant_figures.service(events, window_s=5.0) == {"team-0": [5.0, 5.0], "team-1": [5.0 + 10.0, 0.0]}


def test_jains_index_and_percentiles() -> None:
    assert multitenant_figures.jain([2.0, 2.0]) == pytest.approx(1.0)
    assert multitenant_figures.jain([4.0, 0.0]) == pytest.approx(0.5)
    assert multitenant_figures.percentile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0


def test_the_report_has_a_row_for_each_mode(events: multitenant_figures.Events) -> None:
    report = multitenant.report(Workload(2, 0.4, 2), dict.fromkeys(MODES, events))
    assert len(report.splitlines()) == 2 + len(MODES)
    together = next(line for line in report.splitlines() if " D-strict " in line)
    assert "| 0.30 | 1.40 | 0.43 | 70% |" in together


def test_modes_differ_only_in_staleness_and_in_what_runs_at_once() -> None:
    workload = Workload(8, 0.4, 6)
    jobs = {mode: [one for one in manifests(workload, mode, 16) if one["kind"] == "RLJob"] for mode in MODES}
    for mode, found in jobs.items():
        assert len(found) == 8
        assert {one["spec"]["training"].pop("maxStaleness") for one in found} == {0 if mode.strict else 1}
    assert len({json.dumps(found) for found in jobs.values()}) == 1


def test_a_soak_reads_memory_by_part_of_the_run_and_its_slope(events):
    assert soak.samples(events) == [(0.4, {"rollout": 5}), (1.0, {"rollout": 4})]
    assert soak.slope([(0.4, 5.0), (1.0, 4.0)]) == pytest.approx(-1 / 0.6)
    assert soak.slope([(0.0, 1.0), (1.0, 2.0), (2.0, 6.0)]) == pytest.approx(2.5)
    assert soak.slope([(0.5, 3.0)]) == 0.0
