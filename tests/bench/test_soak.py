"""Growth in `bench soak`, from raw events by hand."""

import math

import pytest
from bench import soak_figures
from bench.multitenant_figures import Events, JobEvents
from bench.soak_figures import Slope
from tests.bench.raw_events import BEGIN, turn

from marlaas.episodes.record import EpisodeRecord
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
