"""Growth in `bench soak`, from raw events by hand; and the driver that lets jobs come and go."""

import math
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from bench import multitenant_env, soak, soak_figures
from bench.multitenant_figures import Events, JobEvents
from bench.multitenant_workload import Workload
from bench.soak_driver import Churn, Progress, TimeLimit, ended
from bench.soak_figures import Slope
from tests.bench.raw_events import BEGIN, turn

from marlaas.episodes.record import EpisodeRecord
from marlaas.local.changes import ChangeAnswer, RunChange, take
from marlaas.local.folder import OutFolder, hold
from marlaas_api.names import Split


def episode(at: float) -> EpisodeRecord:
    one = turn(at, engine_s=0.5)
    return EpisodeRecord(episode=f"e{at}", group="g", split=Split.TRAIN, index=0, member=0, at=one.at, turns=(one,))


def sample(at: float, mib: float, keys: int) -> dict[str, object]:
    stream = {"messages": keys, "bytes": 2048, "subjects": keys, "consumers": 3}
    counts = {"pss_bytes": {"rollout": int(mib * 2**20)}, "files": {"rollout": 7}, "threads": {"rollout": 4}}
    return {"at": BEGIN + at, "cpu_s": {}, "streams": {"KV_jobs": stream}} | counts


@pytest.fixture
def events() -> Events:
    """Ten episodes in ten seconds; a sample every two seconds, the last of them after the run."""
    job = JobEvents("team-0", (BEGIN + 10.0,), tuple(episode(at + 0.5) for at in range(10)))
    usage = [sample(at, 100.0 + at, keys=int(at)) for at in (2, 4, 6, 8, 10, 12)]
    return Events({"team-0/job-00": job}, tuple(usage))


def test_samples_are_counted_in_ended_episodes(events: Events) -> None:
    assert [x for x, _ in soak_figures.samples(events)] == [2.0, 4.0, 6.0, 8.0, 10.0]


def test_slopes_have_the_error_of_the_least_squares_line() -> None:
    assert soak_figures.slope([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]) == Slope(2.0, 0.0)
    # Residuals 0.5, -1, 0.5 around 0.5 + 2.5 x: a variance of 1.5 / 1, and 2 of the xs.
    found = soak_figures.slope([(0.0, 1.0), (1.0, 2.0), (2.0, 6.0)])
    assert (found.value, found.error) == pytest.approx((2.5, math.sqrt(1.5 / 2)))
    assert math.isnan(soak_figures.slope([(0.0, 1.0), (1.0, 2.0)]).error)
    assert math.isnan(soak_figures.slope([(1.0, 1.0)]).value)
    assert math.isnan(soak_figures.slope([]).value)
    assert soak_figures.kib(soak_figures.slope([(0.0, 1.0), (1.0, 2.0)])) == ""


def test_the_tables_have_memory_handles_and_streams(events: Events) -> None:
    taken = soak_figures.samples(events)
    assert "| rollout | 102 | 104 | 110 | +1024000 ± 0 |" in soak_figures.memory_table(taken), "1 MiB an episode"
    assert "| rollout | 7 / 4 | 7 / 4 | 7 / 4 |" in soak_figures.handles_table(taken)
    assert "| KV_jobs | 2 / 2 / 2 / 3 | 4 / 2 / 4 / 3 | 10 / 2 / 10 / 3 |" in soak_figures.streams_table(taken)


def test_growth_by_jobs_is_what_long_jobs_do_not_have(events: Events) -> None:
    flat = replace(events, usage=tuple(sample(at, 100.0, keys=1) for at in (2, 4, 6, 8, 10)))
    both = (soak_figures.samples(one) for one in (events, flat))
    assert "| rollout | +0 ± 0 | +5120000 ± 0 |" in soak_figures.apart_table(*both, episodes_per_job=50.0)
    assert Slope(5.0, 3.0) - Slope(1.0, 4.0) == Slope(4.0, 5.0)
    assert Slope(5.0, 3.0) * -2 == Slope(-10.0, 6.0)


def test_a_run_without_samples_is_told_in_a_sentence(events: Events) -> None:
    assert soak.report("long", replace(events, usage=())).endswith("0 samples: too few for a table")
    assert "| rollout | 102 |" in soak.report("long", events)


def test_both_workloads_have_the_same_episodes() -> None:
    assert (soak.steps_of(200, 10_000), soak.steps_of(20, 10_000)) == (7, 63)


@pytest.mark.parametrize(
    ("made", "num_left", "wanted"),
    [
        ({0: 3, 1: 1}, 5, [0]),
        ({0: 3, 1: 1}, 0, []),
        ({0: 3, 1: 4}, 0, [0, 1]),
        ({0: 0, 1: 0}, 5, []),
    ],
)
def test_jobs_end_after_their_steps_and_the_last_ones_together(made, num_left: int, wanted: list[int]) -> None:
    assert ended(Progress(made, num_left), 3) == wanted


def test_a_time_limit_ends_a_run() -> None:
    assert TimeLimit(-1.0).look(Path("/run"))
    assert not TimeLimit(None).look(Path("/run"))
    assert not TimeLimit(3600.0).look(Path("/run"))


def answering(folder: OutFolder, changes: list[RunChange], stop: threading.Event) -> None:
    while not stop.is_set():
        for question in take(folder, tuple):
            changes.append(question.change)
            question.answer(ChangeAnswer())


def test_jobs_that_have_made_their_steps_are_deleted_and_the_next_ones_submitted(tmp_path: Path) -> None:
    modules, changes, stop = tmp_path / "modules", list[RunChange](), threading.Event()
    modules.mkdir()
    (modules / "multitenant_env.py").write_text(Path(str(multitenant_env.__file__)).read_text())
    churn = Churn(Workload(3, 0.0, 2), 2, 2, TimeLimit(None), soak.MODE)
    assert (churn.first().num_jobs, churn.first().steps) == (2, 10_000)

    def make(job: str, steps: int) -> None:
        folder = tmp_path / "run" / job
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "steps.jsonl").write_text("{}\n" * steps)

    with hold(tmp_path / "run") as folder:
        runner = threading.Thread(target=answering, args=(folder, changes, stop))
        runner.start()
        try:
            make("team-0/job-00", 2)
            assert not churn.look(tmp_path / "run")
            (change,) = changes
            assert [str(job.ref) for job in change.jobs] == ["team-2/job-02"]
            assert change.cancel == ("team-0.job-00",)
            make("team-1/job-01", 2)
            assert not churn.look(tmp_path / "run"), "the last jobs end together"
            make("team-2/job-02", 2)
            assert churn.look(tmp_path / "run")
        finally:
            stop.set()
            runner.join()
    assert len(changes) == 1
