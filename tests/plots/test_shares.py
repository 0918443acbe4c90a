"""Shares and occupancy of many jobs, against numbers that are computed by hand."""

import math

import pytest

from marlaas.episodes.record import EpisodeRecord, TurnRecord
from marlaas.plots.occupancy import busy_share, by_group, merged, num_busy, on_common_time
from marlaas.plots.series import Timeline
from marlaas.plots.shares import service, shares
from marlaas_api.messages import StopReason
from marlaas_api.names import Split


def turn(at: float, engine_s: float, tokens: int, prompt: int = 0, queue_s: float = 0.0) -> TurnRecord:
    body = {"agent": "policy", "turn": 0, "version": 0, "append": "x", "text": "y", "stop_reason": StopReason.STOP}
    times = {"at": at, "engine_s": engine_s, "queue_s": queue_s, "output_ids": (1,) * tokens}
    return TurnRecord(**body, **times, num_prompt_tokens=prompt, num_cached_tokens=prompt // 2)


def episode(*turns: TurnRecord) -> EpisodeRecord:
    return EpisodeRecord(episode="e", group="u-t0", split=Split.TRAIN, index=0, member=0, at=turns[-1].at, turns=turns)


def test_tenants_receive_what_their_turns_cost_and_are_entitled_by_weight_while_active():
    # three windows of five seconds; team-b waits in the queue from 10, and its only turn runs from 12.5 to 15
    first = episode(turn(5.0, 5.0, 20, prompt=20), turn(15.0, 5.0, 10))
    second = service("team-b", 3.0, [episode(turn(15.0, 2.5, 30, queue_s=2.5))])
    one, other = shares([second, service("team-a", 1.0, [first]), service("team-c", 1.0, [])])
    assert (one.tenant, one.begin, one.window_s) == ("team-a", 0.0, 5.0)
    assert one.received[::2] == pytest.approx([1.0, 10 / 40])
    assert math.isnan(one.received[1])
    assert one.entitled == pytest.approx([1.0, 1.0, 1 / 4])
    assert other.entitled == pytest.approx([0.0, 0.0, 3 / 4])
    assert (one.received_all, other.received_all) == pytest.approx((40 / 70, 30 / 70))
    assert one.entitled_all == pytest.approx((30 * 1.0 + 40 / 4) / 70)


def test_a_turn_over_several_windows_is_divided_and_jobs_of_a_tenant_are_added():
    jobs = [
        service("team-a", 1.0, [episode(turn(10.0, 10.0, 40))]),
        service("team-a", 1.0, [episode(turn(4.0, 0.0, 5))]),
    ]
    one, other = shares([*jobs, service("team-b", 1.0, [episode(turn(10.0, 5.0, 20, queue_s=5.0))])])
    assert one.received == pytest.approx([1.0, 20 / 40])
    assert other.received == pytest.approx([0.0, 20 / 40])


@pytest.mark.parametrize("services", [[], [service("team-a", 1.0, [episode(turn(5.0, 5.0, 20))])]])
def test_one_tenant_alone_has_no_shares(services):
    assert shares(services) == ()


def job(name: str, begin: float, end: float, run: str = "r", group: str = "team-a") -> Timeline:
    return Timeline(name, begin, end, ((begin, end),), ((begin, begin + 1.0),), None, run, group)


def test_jobs_of_one_run_have_a_common_time_and_those_of_two_runs_begin_together():
    moved = on_common_time([job("a", 100.0, 110.0), job("b", 104.0, 108.0), job("c", 500.0, 503.0, run="s")])
    assert [(one.begin, one.end) for one in moved] == [(0.0, 10.0), (4.0, 8.0), (0.0, 3.0)]
    assert moved[1].engine == ((4.0, 8.0),)
    assert moved[1].trainer is None


def test_a_lane_counts_its_jobs_over_time_and_a_group_is_busy_while_one_of_its_jobs_is():
    jobs = [job("b", 4.0, 8.0), job("a", 0.0, 10.0)]
    assert num_busy(jobs, "engine", 10.0, 5) == pytest.approx([1.0, 1.0, 2.0, 2.0, 1.0])
    assert num_busy(jobs, "environment", 10.0, 5) == pytest.approx([0.5, 0.0, 0.5, 0.0, 0.0])
    assert num_busy(jobs, "trainer", 10.0, 5) == [0.0] * 5
    assert (busy_share(jobs, "environment", 10.0), busy_share(jobs, "trainer", 10.0)) == (0.2, None)
    assert {name: [one.name for one in found] for name, found in by_group(jobs).items()} == {"team-a": ["a", "b"]}
    whole = merged("team-a", jobs)
    assert (whole.engine, whole.environment, whole.trainer) == (((0.0, 10.0),), ((0.0, 1.0), (4.0, 5.0)), None)
