"""Curves, timelines and shares against numbers that are computed by hand."""

import math

import pytest
from tests.harness import a_step, identity, job_document
from tests.tables import rows

from marlaas.episodes.record import EpisodeRecord, TurnRecord
from marlaas.plots.occupancy import busy_share, by_group, merged, num_busy, on_common_time
from marlaas.plots.series import (
    ENTROPY,
    EVAL,
    GAP,
    KL,
    LENGTH,
    PANELS,
    REWARD,
    STALENESS,
    Timeline,
    job_curves,
    reward_range,
    timeline,
    union,
)
from marlaas.plots.shares import service, shares
from marlaas_api.messages import AgentStep, EvalRecord, JobDocument, StepOutcome, StepRecord, StopReason
from marlaas_api.messages.agent_settings import PolicySettings
from marlaas_api.names import Split


def document(**training: object) -> JobDocument:
    return job_document("one", spec={"rollout": {"groupSize": 4}, "training": {"steps": 3, **training}})


def step(number: int, mean: float = 0.5, std: float = 0.5, **fields: object) -> StepRecord:
    figures = {"at": 10.0 * (number + 1), "wall_s": 10.0, "reward_mean": mean, "reward_std": std}
    return a_step(document(), number, **{**figures, "num_groups": 2, "num_episodes": 16, **fields})


def evaluation(done: int, mean: float) -> EvalRecord:
    return EvalRecord(**identity(document()), step=done, version=done, at=1.0, reward_mean=mean, num_episodes=8)


def test_every_panel_has_its_curve_at_the_steps_that_were_finished():
    metrics = {"tokens": 40.0, "entropy": 1.0, "behaviour_kl": 0.1, "kl": 0.2, "logprob_gap": 0.01}
    steps = [step(0, metrics=metrics, staleness_mean=0.5), step(1, num_groups=0, outcome=StepOutcome.NO_OP)]
    curves = job_curves("one", document(), steps, [evaluation(0, 0.2), evaluation(2, 0.8)])[0].curves
    assert set(curves) == set(PANELS)
    assert curves[REWARD].points == ((1.0, 0.5), (2.0, 0.5))
    assert curves[EVAL].points == ((0.0, 0.2), (2.0, 0.8))
    assert curves[LENGTH].ys[0] == 40.0 / 8
    assert curves[GAP].ys[0] == 0.01
    assert (curves[STALENESS].ys[0], math.isnan(curves[STALENESS].ys[1])) == (0.5, True)
    assert all(math.isnan(curves[panel].ys[1]) for panel in (LENGTH, GAP, KL))


def test_each_trained_agent_has_curves_of_its_own():
    one = document()
    solver, *_ = one.spec.agents
    agents = [
        solver.model_copy(update={"name": "solver"}),
        solver.model_copy(update={"name": "second", "policy": PolicySettings(of="solver")}),
        solver.model_copy(update={"name": "judge", "trainable": False}),
    ]
    one = one.model_copy(update={"spec": one.spec.model_copy(update={"agents": tuple(agents)})})
    parts = {
        "solver": AgentStep(outcome="committed", version=1, reward_mean=0.25, num_groups=2, staleness_mean=0.5),
        "second": AgentStep(outcome="committed", version=1, reward_mean=None),
        "judge": AgentStep(outcome="no_op", version=0, reward_mean=1.0),
    }
    metrics = {"solver/tokens": 80.0, "solver/entropy": 1.5, "judge/train_s": 2.0}
    held_out = evaluation(0, 0.3).model_copy(update={"rewards": {"solver": 0.1, "second": 0.5, "judge": 0.0}})
    found = {
        drawn.name: drawn.curves
        for drawn in job_curves("one", one, [step(0, metrics=metrics, agents=parts)], [held_out])
    }
    assert list(found) == ["one, solver", "one, second"]
    assert all(set(curves) == set(PANELS) for curves in found.values())
    values = {
        name: [curves[panel].ys[0] for panel in (REWARD, EVAL, LENGTH, ENTROPY, STALENESS)]
        for name, curves in found.items()
    }
    assert values["one, solver"] == [0.25, 0.1, 80.0 / 8, 1.5, 0.5]
    assert math.isnan(values["one, second"][0])
    assert values["one, second"][1:] == [0.5, 80.0 / 8, 1.5, 0.0]


@pytest.mark.parametrize(
    ("steps", "bounds"),
    [
        ([step(0, 0.5, 0.5), step(1, 1.0, 0.0)], (0.0, 1.0)),
        ([step(0, 0.5, 0.6)], (-math.inf, math.inf)),
        ([step(0, 0.5, 0.1), step(1, -0.1, 0.1)], (-math.inf, math.inf)),
    ],
)
def test_rewards_are_thought_to_be_shares_only_where_every_step_could_come_from_shares(steps, bounds):
    assert reward_range(steps) == bounds


def _turn(number: int, at: float, engine_s: float, queue_s: float = 0.0) -> TurnRecord:
    body = {"agent": "policy", "version": 0, "append": "x", "text": "y", "stop_reason": StopReason.STOP}
    return TurnRecord(**body, turn=number, at=at, engine_s=engine_s, queue_s=queue_s)


def _episode(at: float, *turns: TurnRecord) -> EpisodeRecord:
    return EpisodeRecord(episode="e", group="u-t0", split=Split.TRAIN, index=0, member=0, at=at, turns=turns)


@pytest.mark.parametrize(("intervals", "gap_s", "joined"), rows(__file__, "intervals"))
def test_intervals_become_disjoint_and_in_order(intervals, gap_s, joined):
    assert [list(one) for one in union(intervals, gap_s)] == joined


def test_engine_environment_and_trainer_are_where_the_record_says():
    first = _episode(21.0, _turn(0, 12.0, 2.0), _turn(1, 20.0, 1.0, queue_s=3.0))
    episodes = [first, _episode(13.0, _turn(0, 13.0, 2.0))]
    one = timeline("a", episodes, [step(0, metrics={"train_s": 4.0}, at=30.0, wall_s=30.0)])
    assert (one.begin, one.end) == (0.0, 30.0)
    assert one.engine == ((10.0, 13.0), (19.0, 20.0))
    assert one.environment == ((12.0, 16.0), (20.0, 21.0))
    assert one.trainer == ((26.0, 30.0),)
    assert one.share(one.engine) == pytest.approx(4 / 30)


def test_what_nobody_recorded_is_not_drawn_as_idle():
    one = timeline("a", [_episode(12.0, _turn(0, 12.0, 2.0))], [step(0)])
    assert one.trainer is None
    assert timeline("a", [], [step(0)]) is None
    only = timeline("a", [], [step(0, metrics={"train_s": 4.0})])
    assert (only.engine, only.environment) == (None, None)


def spent(at: float, engine_s: float, tokens: int, prompt: int = 0, queue_s: float = 0.0) -> TurnRecord:
    body = {"agent": "policy", "turn": 0, "version": 0, "append": "x", "text": "y", "stop_reason": StopReason.STOP}
    times = {"at": at, "engine_s": engine_s, "queue_s": queue_s, "output_ids": (1,) * tokens}
    return TurnRecord(**body, **times, num_prompt_tokens=prompt, num_cached_tokens=prompt // 2)


def played(*turns: TurnRecord) -> EpisodeRecord:
    return EpisodeRecord(episode="e", group="u-t0", split=Split.TRAIN, index=0, member=0, at=turns[-1].at, turns=turns)


def test_tenants_receive_what_their_turns_cost_and_are_entitled_by_weight_while_active():
    # three windows of five seconds; team-b waits in the queue from 10, and its only turn runs from 12.5 to 15
    first = played(spent(5.0, 5.0, 20, prompt=20), spent(15.0, 5.0, 10))
    second = service("team-b", 3.0, [played(spent(15.0, 2.5, 30, queue_s=2.5))])
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
        service("team-a", 1.0, [played(spent(10.0, 10.0, 40))]),
        service("team-a", 1.0, [played(spent(4.0, 0.0, 5))]),
    ]
    one, other = shares([*jobs, service("team-b", 1.0, [played(spent(10.0, 5.0, 20, queue_s=5.0))])])
    assert one.received == pytest.approx([1.0, 20 / 40])
    assert other.received == pytest.approx([0.0, 20 / 40])


@pytest.mark.parametrize("services", [[], [service("team-a", 1.0, [played(spent(5.0, 5.0, 20))])]])
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
