"""Curves, timelines and shares against numbers that are computed by hand; and of pictures, what a machine can say."""

import math
import re
import xml.etree.ElementTree as ET

import pytest
from tests.harness import a_step, identity, job_document
from tests.tables import rows

from marlaas.episodes.record import EpisodeRecord, TurnRecord
from marlaas.plots import series
from marlaas.plots.figure import draw, page
from marlaas.plots.occupancy import busy_share, by_group, merged, num_busy, on_common_time
from marlaas.plots.series import EVAL, REWARD, Curve, JobCurves, Timeline
from marlaas.plots.shares import service, shares
from marlaas_api.messages import AgentStep, EvalRecord, JobDocument, StepOutcome, StepRecord, StopReason
from marlaas_api.messages.agent_settings import PolicySettings
from marlaas_api.names import Split

CURVES = {REWARD: Curve(((1.0, 0.2), (2.0, 0.8)), (0.1, 0.1)), EVAL: Curve(((0.0, 0.1), (2.0, 0.9)))}
JOBS = [JobCurves(f"team/<{name}>", CURVES) for name in ("first", "second")]
TIMES = [Timeline("team/<first>", 0.0, 60.0, ((0.0, 30.0),), (), None)]


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
    curves = series.job_curves("one", document(), steps, [evaluation(0, 0.2), evaluation(2, 0.8)])[0].curves
    assert set(curves) == set(series.PANELS)
    assert curves[series.REWARD].points == ((1.0, 0.5), (2.0, 0.5))
    assert curves[series.EVAL].points == ((0.0, 0.2), (2.0, 0.8))
    assert curves[series.LENGTH].ys[0] == 40.0 / 8
    assert curves[series.GAP].ys[0] == 0.01
    assert (curves[series.STALENESS].ys[0], math.isnan(curves[series.STALENESS].ys[1])) == (0.5, True)
    assert all(math.isnan(curves[panel].ys[1]) for panel in (series.LENGTH, series.GAP, series.KL))


def test_demonstrations_have_losses_and_the_held_out_ones_where_they_were_measured():
    metrics = {"loss": 3.0, "held_out_loss": 4.0}, {"loss": 2.0}, {"loss": 0.1}
    found = [step(at, is_demonstrated=at < 2, metrics=one) for at, one in enumerate(metrics)]
    (job,) = series.job_curves("one", document(), found, [])
    assert [job.curves[one].points for one in series.panels_of([job])[-2:]] == [((1.0, 3.0), (2.0, 2.0)), ((0.0, 4.0),)]


def test_each_trained_agent_has_curves_of_its_own():
    one = document()
    solver, *_ = one.spec.agents
    second = {"name": "second", "policy": PolicySettings(of="solver")}
    settings = {"name": "solver"}, second, {"name": "judge", "trainable": False}
    agents = [solver.model_copy(update=one) for one in settings]
    one = one.model_copy(update={"spec": one.spec.model_copy(update={"agents": tuple(agents)})})
    parts = {
        "solver": AgentStep(outcome="committed", version=1, reward_mean=0.25, num_groups=2, staleness_mean=0.5),
        "second": AgentStep(outcome="committed", version=1, reward_mean=None),
        "judge": AgentStep(outcome="no_op", version=0, reward_mean=1.0),
    }
    metrics = {"solver/tokens": 80.0, "solver/entropy": 1.5, "judge/train_s": 2.0}
    held_out = evaluation(0, 0.3).model_copy(update={"rewards": {"solver": 0.1, "second": 0.5, "judge": 0.0}})
    drawn = series.job_curves("one", one, [step(0, metrics=metrics, agents=parts)], [held_out])
    found = {each.name: each.curves for each in drawn}
    assert list(found) == ["one, solver", "one, second"]
    assert all(set(curves) == set(series.PANELS) for curves in found.values())
    panels = (series.REWARD, series.EVAL, series.LENGTH, series.ENTROPY, series.STALENESS)
    values = {name: [curves[panel].ys[0] for panel in panels] for name, curves in found.items()}
    assert values["one, solver"] == [0.25, 0.1, 80.0 / 8, 1.5, 0.5]
    assert math.isnan(values["one, second"][0])
    assert values["one, second"][1:] == [0.5, 80.0 / 8, 1.5, 0.0]


@pytest.mark.parametrize(("figures", "bounds"), rows(__file__, "reward_ranges"))
def test_rewards_are_thought_to_be_shares_only_where_every_step_could_come_from_shares(figures, bounds):
    steps = [step(number, *figures) for number, figures in enumerate(figures)]
    assert series.reward_range(steps) == tuple(bounds)


def _turn(number: int, at: float, engine_s: float, queue_s: float = 0.0) -> TurnRecord:
    body = {"agent": "policy", "version": 0, "append": "x", "text": "y", "stop_reason": StopReason.STOP}
    return TurnRecord(**body, turn=number, at=at, engine_s=engine_s, queue_s=queue_s)


def _episode(at: float, *turns: TurnRecord) -> EpisodeRecord:
    return EpisodeRecord(episode="e", group="u-t0", split=Split.TRAIN, index=0, member=0, at=at, turns=turns)


@pytest.mark.parametrize(("intervals", "gap_s", "joined"), rows(__file__, "intervals"))
def test_intervals_become_disjoint_and_in_order(intervals, gap_s, joined):
    assert [list(one) for one in series.union(intervals, gap_s)] == joined


def test_engine_environment_and_trainer_are_where_the_record_says():
    first = _episode(21.0, _turn(0, 12.0, 2.0), _turn(1, 20.0, 1.0, queue_s=3.0))
    episodes = [first, _episode(13.0, _turn(0, 13.0, 2.0))]
    one = series.timeline("a", episodes, [step(0, metrics={"train_s": 4.0}, at=30.0, wall_s=30.0)])
    assert (one.begin, one.end) == (0.0, 30.0)
    assert one.engine == ((10.0, 13.0), (19.0, 20.0))
    assert one.environment == ((12.0, 16.0), (20.0, 21.0))
    assert one.trainer == ((26.0, 30.0),)
    assert one.share(one.engine) == pytest.approx(4 / 30)


def test_what_nobody_recorded_is_not_drawn_as_idle():
    one = series.timeline("a", [_episode(12.0, _turn(0, 12.0, 2.0))], [step(0)])
    assert one.trainer is None
    assert series.timeline("a", [], [step(0)]) is None
    only = series.timeline("a", [], [step(0, metrics={"train_s": 4.0})])
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
    turns = spent(10.0, 10.0, 40), spent(4.0, 0.0, 5)
    jobs = [service("team-a", 1.0, [played(turn)]) for turn in turns]
    one, other = shares([*jobs, service("team-b", 1.0, [played(spent(10.0, 5.0, 20, queue_s=5.0))])])
    assert one.received == pytest.approx([1.0, 20 / 40])
    assert other.received == pytest.approx([0.0, 20 / 40])


@pytest.mark.parametrize("services", [[], [service("team-a", 1.0, [played(spent(5.0, 5.0, 20))])]])
def test_one_tenant_alone_has_no_shares(services):
    assert shares(services) == ()


def job(name: str, begin: float, end: float, run: str = "r", group: str = "team-a") -> series.Timeline:
    return series.Timeline(name, begin, end, ((begin, end),), ((begin, begin + 1.0),), None, run, group)


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


def test_the_picture_names_jobs_panels_and_shares():
    text = " ".join(element.text or "" for element in ET.fromstring(draw(JOBS, TIMES, "svg")).iter())
    shares = ("engine, 50 %", "environment, 0 %", "trainer, not recorded")
    for words in ("team/<first>", "team/<second>", "reward in training", *shares):
        assert words in text


def test_the_page_is_one_file_that_loads_nothing_and_escapes_names():
    text = page("<script>", JOBS, draw(JOBS, TIMES, "svg")).decode()
    assert text.startswith("<!doctype html>")
    assert "<script>" not in text
    assert "team/&lt;first&gt;" in text
    assert "<td>0.10</td><td>0.90</td><td>0.80</td>" in text
    references = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert all(reference.startswith("#") for reference in references)
    assert "@import" not in text
