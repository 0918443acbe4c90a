"""Estimates of jobs against numbers counted by hand."""

from dataclasses import replace

import pytest
from tests.harness import a_step, identity, job_document
from typer.testing import CliRunner

from marlaas.cli.app import build
from marlaas.local import estimates
from marlaas.local.results import JobResult
from marlaas_api.messages import EvalRecord, Phase
from marlaas_api.messages.pool_spec import PoolSpec
from marlaas_api.messages.usage import UsageAmounts

POOL = PoolSpec.model_validate({"model": {"builtin": "tiny"}})
SPEC = {
    "environment": {"name": "reverse"},
    "rollout": {"groupSize": 4, "maxTokens": 8, "maxTurns": 2},
    "training": {"steps": 10, "groupsPerStep": 2, "maxStaleness": 0},
    "evaluation": {"every": 5, "tasks": 8},
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MARLAAS_CACHE", str(tmp_path / "cache"))


def job(**changed: object):
    return job_document("sums", spec={**SPEC, **changed})


@pytest.fixture
def ended(progress_of):
    """Two steps of 8 episodes with 6 tokens each, two evaluations of 8 episodes with 4 tokens, in 10 s.

    Engine and trainer worked 2 and 1 s for the steps, and 2 s for the evaluations: 6 s and 4 s are theirs.
    """
    document = job(training={**SPEC["training"], "steps": 2})
    trained = UsageAmounts(generated_tokens=48, engine_s=1.0, trainer_s=0.5)
    evaluated = UsageAmounts(generated_tokens=32, engine_s=1.0)
    steps = tuple(a_step(document, step, usage={"policy": trained}) for step in range(2))
    record = {"at": 1.0, "reward_mean": 0.5, "num_episodes": 8, "usage": {"policy": evaluated}}
    evals = tuple(EvalRecord(**identity(document), step=at, version=at, **record) for at in (0, 2))
    progress = progress_of(document, phase=Phase.SUCCEEDED, admitted_s=10.0)
    return JobResult(document, progress, steps, evals)


@pytest.mark.parametrize("num_jobs", [1, 2])
def test_an_estimate_multiplies_what_an_ended_job_took_and_divides_what_jobs_took_together(ended, num_jobs):
    estimates.add([estimates.measured(ended, POOL, num_jobs, 100.0)])
    (known,) = estimates.read()
    assert estimates.total_s([estimates.estimate(ended.document, POOL, [known])] * num_jobs) == pytest.approx(10.0)
    found = estimates.estimate(job(), POOL, [known])
    assert (found.episodes, found.evaluated, found.work.tokens) == (80, 24, pytest.approx(80 * 6 + 24 * 4))
    assert found.work.seconds == pytest.approx((5 * 6.0 + 1.5 * 4.0) / num_jobs)
    assert (found.work.engine_s, found.work.trainer_s) == (pytest.approx(5 * 2.0 + 1.5 * 2.0), pytest.approx(5.0))


OTHER = {
    "another environment": {"environment": {"name": "calculator"}},
    "other arguments": {"environment": {"name": "reverse", "args": {"partial": True}}},
    "longer replies": {"rollout": {"maxTokens": 9}},
    "asynchronous": {"training": {**SPEC["training"], "maxStaleness": 1}},
    "demonstrations too": {"training": {**SPEC["training"], "algorithm": "sft", "maxStaleness": 0}},
    "an agent more": {"agents": [{"name": "a"}, {"name": "b"}]},
    "a suite of its own": {
        "evaluation": {"suites": [{"name": "c", "maxTokens": 32, "environment": {"name": "calculator"}}]}
    },
}


@pytest.mark.parametrize("changed", OTHER.values(), ids=OTHER)
def test_without_a_job_like_it_the_tokens_are_a_bound_and_the_time_is_not_known(ended, changed):
    document = job(**changed)
    found = estimates.estimate(document, POOL, [estimates.measured(ended, POOL, 1, 100.0)])
    spec = document.spec
    longest = [found.episodes * spec.rollout.max_tokens]
    longest += [3 * one.tasks * (one.max_tokens or spec.rollout.max_tokens) for one in spec.evaluation.plan]
    if spec.evaluation.suites:  # every 10 steps, by default: at first and at the end
        longest[1] = 2 * 64 * 32
    assert found.most_tokens == sum(longest) * spec.rollout.max_turns * len(spec.called_agents)
    assert found.work is None
    (line,) = estimates.lines([found])
    assert "a run of a few steps measures it" in line


def test_a_job_that_failed_or_rates_of_another_release_are_no_measure(ended, progress_of, tmp_path):
    failed = JobResult(ended.document, progress_of(ended.document, phase=Phase.FAILED), ended.steps, ended.evals)
    assert estimates.measured(failed, POOL, 1, 100.0) is None
    file = tmp_path / "cache/rates.jsonl"
    file.parent.mkdir()
    file.write_bytes(b'{"like": 1}\nno JSON \xff\n')
    assert estimates.read() == []
    estimates.add([estimates.measured(ended, POOL, 1, 100.0)] * (estimates.MAX_RATES + 1))
    assert len(estimates.read()) == estimates.MAX_RATES


def test_demonstrations_are_counted_by_row_and_of_several_jobs_the_newest_rates_count(ended):
    fine_tuned = job(training={**SPEC["training"], "algorithm": "sft", "maxStaleness": 1}, evaluation={"tasks": 0})
    trained = {"policy": UsageAmounts(trainer_s=0.25)}
    steps = tuple(a_step(fine_tuned, step, wall_s=4.0, is_demonstrated=True, usage=trained) for step in range(10))
    result = JobResult(fine_tuned, ended.progress.model_copy(update={"admitted_s": 40.0}), steps)
    old, new = (estimates.measured(result, POOL, num, at) for num, at in ((4, 1.0), (1, 2.0)))
    found = estimates.estimate(fine_tuned, POOL, [new, old])
    assert (found.rows, found.episodes, found.work.tokens) == (20, 0, 0.0)
    assert (found.work.seconds, found.work.trainer_s) == (pytest.approx(40.0), pytest.approx(2.5))


@pytest.mark.parametrize(
    ("steps", "every", "first", "num"), [(10, 5, 0, 3), (10, 3, 0, 5), (0, 10, 0, 1), (9, 4, 2, 5)]
)
def test_as_many_versions_are_counted_as_a_job_evaluates(steps, every, first, num):
    init = {"initFrom": {"sft": {"steps": first, "data": {}, "rowsPerStep": 1}}} if first else {}
    training = {**SPEC["training"], "steps": steps}
    agents = [{"name": "policy", **init}]
    document = job(training=training, evaluation={"every": every, "tasks": 8}, agents=agents)
    assert estimates.estimate(document, POOL, []).evaluated == 8 * num
    assert sum(document.spec.evaluates(step) for step in range(steps + 1)) == num


def test_a_teacher_generates_nothing_and_scores_what_its_student_generates_in_training(ended):
    agents = [{"name": "policy"}, {"name": "teacher", "trainable": False}]
    distill = {"algorithm": "distill", "distillation": {"teacher": "teacher"}}
    short, long = (job(agents=agents, training={**SPEC["training"], **distill, "steps": steps}) for steps in (2, 10))
    bound = estimates.estimate(long, POOL, [])
    assert (bound.scored, bound.most_tokens) == (80 * 8 * 2, (80 + 3 * 8) * 8 * 2)
    assert "at most 1,664 tokens, of which a teacher scores at most 1,280;" in next(estimates.lines([bound]))
    measured = estimates.measured(replace(ended, document=short), POOL, 1, 100.0)
    found = estimates.estimate(long, POOL, [measured])
    assert (found.scored, found.work.tokens) == (80 * 6, pytest.approx(80 * 6 + 24 * 4))
    assert estimates.facts(found)["teacherTokens"] == 480
    assert estimates.estimate(job(agents=agents), POOL, []).scored == 0


def test_validate_prints_the_estimate(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    head = "apiVersion: marlaas.dev/v1alpha1\nkind: "
    pool = "ModelPool\nmetadata: {name: tiny}\nspec: {model: {builtin: tiny}}"
    spec = "{poolRef: {name: tiny}, environment: {name: reverse}, training: {steps: 3, groupsPerStep: 2}, evaluation: {tasks: 0}}"
    (tmp_path / "job.yaml").write_text(f"{head}{pool}\n---\n{head}RLJob\nmetadata: {{name: a}}\nspec: {spec}\n")
    said = CliRunner().invoke(build(["validate"]), ["validate", "job.yaml", "--estimate"])
    assert "estimate of default/a: 48 training episodes, at most 98,304 tokens; its time is not known" in said.output
