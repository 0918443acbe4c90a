"""Figures of `bench multitenant` by hand, from raw events as a run writes them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from bench import multitenant_figures as figures
from bench import multitenant_report as reports
from bench.multitenant_engine import EngineTotals
from bench.multitenant_figures import Events
from bench.multitenant_workload import MODES, Mode, Workload
from tests.tables import data

from marlaas.episodes.record import EpisodeRecord, TurnRecord
from marlaas_api.messages import StopReason
from marlaas_api.names import Split
from marlaas_worker.rollout.engine_progress import EngineCounts
from marlaas_worker.rollout.reload_pace import ReloadPace

BEGIN = 1000.0
USAGE = data(__file__, "usage")


def turn(end: float, engine_s: float, queue_s: float = 0.0, tokens: int = 2, version: int = 0) -> TurnRecord:
    """A turn with a prompt of three tokens. end: seconds after BEGIN."""
    return TurnRecord(
        agent="policy",
        turn=0,
        version=version,
        append="x",
        text="y",
        stop_reason=StopReason.STOP,
        prompt_ids=(1,) * 3,
        num_prompt_tokens=3,
        output_ids=(1,) * tokens,
        engine_s=engine_s,
        queue_s=queue_s,
        at=BEGIN + end,
    )


def write_job(folder: Path, name: str, steps: list[float], plays: list[tuple[TurnRecord, ...]]) -> None:
    job = folder / "run" / name
    job.mkdir(parents=True)
    (job / "steps.jsonl").write_text("".join(json.dumps({"at": BEGIN + at}) + "\n" for at in steps))
    (job / "evals.jsonl").write_text(json.dumps({"reward_mean": 0.5}) + "\n")
    episodes = [
        EpisodeRecord(
            episode=f"e{number}",
            group=f"g{number}",
            split=Split.TRAIN,
            index=number,
            member=0,
            at=turns[-1].at,
            turns=turns,
        )
        for number, turns in enumerate(plays)
    ]
    (job / "episodes.jsonl").write_text("".join(f"{one.model_dump_json(exclude_defaults=True)}\n" for one in episodes))


def rollout_log(*, num_reloads: int) -> str:
    """Return the log of a role that was started once. vLLM preempted one of 500 requests. Each load took 0.25 s; three were first loads."""
    pace = ReloadPace(1)
    for number in range(3 + num_reloads):
        pace.add_load("a", 0.25, 0.0, is_reload=number >= 3)
    counts = EngineCounts(steps=40, requests=500, preemptions=1, queued_steps=2)
    return f"=== start rollout-0 (tiny) at\nat INFO marlaas_worker: {counts}\nat INFO marlaas_worker: {pace}\nat: drained\n"


@pytest.fixture
def events(tmp_path: Path) -> Events:
    """Two jobs: from 0 to 10 s with two steps, and from 2 to 6 s with one. The engine computes for 5 of the 10 seconds.

    The command began 20.5 s before; one of two replicas loaded two versions again, the other none.
    """
    logs = tmp_path / "run" / ".state" / "logs"
    logs.mkdir(parents=True)
    for number in range(2):
        (logs / f"rollout-{number}.tiny.log").write_text(rollout_log(num_reloads=2 * number))
    (tmp_path / "done.json").write_text(json.dumps({"began_at": BEGIN - 20.5}))
    first = [(turn(2.0, engine_s=1.0, queue_s=1.0),), (turn(9.0, engine_s=3.0),)]
    write_job(tmp_path, "team-0/job-00", [5.0, 10.0], first)
    second = [(turn(3.0, engine_s=1.0),), (turn(2.0, 0.0), turn(2.0, 0.0, tokens=7))]
    write_job(tmp_path, "team-1/job-01", [6.0], second)
    (tmp_path / "usage.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in USAGE))
    return figures.load(tmp_path)


def mode(letter: str) -> Mode:
    return next(one for one in MODES if one.letter == letter)


def row(text: str, name: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {name} |") or f" | {name} | " in line)
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_rates_processor_time_and_shares_are_those_between_the_first_turn_and_the_last_step(events):
    assert figures.rate_together(events) == pytest.approx(3 / 10)
    assert figures.rate_one_by_one(events) == pytest.approx(3 / (10 + 4))
    assert figures.first_results_s(events) == pytest.approx([5.0, 6.0])
    # The first turn is a fifth of the way between the samples at -1 and 4 s: 20.4 and 0.2 s were used by then.
    assert figures.start_cpu_s(events) == pytest.approx({"rollout": 20.4, "sandbox": 0.2})
    assert figures.cpu_s(events) == pytest.approx({"rollout": 2.6, "sandbox": 2.8})
    assert figures.cpu_bound(events, cores=2) == pytest.approx(2 * 3 / 5.4)
    assert figures.bound_of_others(events, num_jobs=8, rate_of_one=0.1, cores=2) == pytest.approx(0.8)
    assert figures.bound_of_others(events, num_jobs=32, rate_of_one=0.1, cores=2) == pytest.approx(2 * 3 / 5.4)
    assert figures.busy_share(events) == pytest.approx(5 / 10)
    assert figures.occupancy(events) == pytest.approx(5 / 5), "turns at the same time count once"
    # Two re-loads of 0.25 s take 5 % of 10 s, and 10 % of the 5 s in which the engine computes; first loads do not count.
    assert events.engine == EngineTotals(2, 1000, 4, 80, num_loads=8, load_s=2.0, num_reloads=2, reload_s=0.5)
    assert figures.reload_shares(events) == pytest.approx((0.05, 0.1))


def test_jains_index_and_percentiles():
    assert figures.jain([2.0, 2.0]) == pytest.approx(1.0)
    assert figures.jain([4.0, 0.0]) == pytest.approx(0.5)
    assert figures.percentile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0


def test_rounds_are_compared_in_pairs(events):
    """The second round of D has half of A's rate of that round; a ratio of medians would be 1.05."""
    slow = replace(events, jobs={name: replace(job, steps=job.steps[-1:]) for name, job in events.jobs.items()})
    text = reports.rates(Workload(2, 0.4, 2), {mode("A"): [events, events], mode("D"): [events, slow]}, cores=2)
    assert row(text, "D-strict")[3:5] == ["0.25 (0.20 to 0.30)", "1.17 (0.93 to 1.40)"]
