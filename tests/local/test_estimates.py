"""What a job will take: counted by hand, and measured on jobs that have ended."""

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
    """Two steps of 8 episodes with 6 tokens each, in 3 s each; two evaluations of 8 episodes with 4 tokens in the 4 s that are left."""
    document = job(training={**SPEC["training"], "steps": 2})
    trained = UsageAmounts(generated_tokens=48, engine_s=1.0, trainer_s=0.5)
    evaluated = UsageAmounts(generated_tokens=32, engine_s=1.0)
    steps = tuple(a_step(document, step, wall_s=3.0, usage={"policy": trained}) for step in range(2))
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
    assert (found.episodes, found.evaluated, found.tokens) == (80, 24, pytest.approx(80 * 6 + 24 * 4))
    assert found.seconds == pytest.approx((10 * 3.0 + 3 * 2.0) / num_jobs)
    assert (found.engine_s, found.trainer_s) == (pytest.approx(576 * 4 / 160), pytest.approx(5.0))


@pytest.mark.parametrize("changed", [{"environment": {"name": "calculator"}}, {"rollout": {"maxTokens": 9}}])
def test_without_a_job_like_it_the_tokens_are_a_bound_and_the_time_is_not_known(ended, changed):
    rates = estimates.measured(ended, POOL, 1, 100.0)
    document = job(**changed)
    found = estimates.estimate(document, POOL, [rates])
    longest = document.spec.rollout.max_tokens * document.spec.rollout.max_turns
    assert (found.tokens, found.seconds) == ((found.episodes + found.evaluated) * longest, None)
    (line,) = estimates.lines([found])
    assert "at most" in line
    assert "a run of a few steps measures it" in line


def test_a_job_that_failed_or_rates_of_another_release_are_no_measure(ended, progress_of, tmp_path):
    failed = JobResult(ended.document, progress_of(ended.document, phase=Phase.FAILED), ended.steps, ended.evals)
    assert estimates.measured(failed, POOL, 1, 100.0) is None
    file = tmp_path / "cache/rates.jsonl"
    file.parent.mkdir()
    file.write_text('{"like": 1}\nno JSON\n')
    assert estimates.read() == []
    estimates.add([estimates.measured(ended, POOL, 1, 100.0)] * (estimates.MAX_RATES + 1))
    assert len(estimates.read()) == estimates.MAX_RATES


def test_demonstrations_are_counted_by_row_and_of_several_jobs_the_newest_rates_count(ended):
    fine_tuned = job(training={**SPEC["training"], "algorithm": "sft", "maxStaleness": 1}, evaluation={"tasks": 0})
    steps = tuple(a_step(fine_tuned, step, wall_s=4.0, is_demonstrated=True) for step in range(10))
    result = JobResult(fine_tuned, ended.progress.model_copy(update={"admitted_s": 40.0}), steps)
    old, new = (estimates.measured(result, POOL, num, at) for num, at in ((4, 1.0), (1, 2.0)))
    found = estimates.estimate(fine_tuned, POOL, [new, old])
    assert (found.rows, found.episodes, found.seconds) == (20, 0, pytest.approx(40.0))


def test_validate_prints_the_estimate(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    head = "apiVersion: marlaas.dev/v1alpha1\nkind: "
    pool = "ModelPool\nmetadata: {name: tiny}\nspec: {model: {builtin: tiny}}"
    spec = "{poolRef: {name: tiny}, environment: {name: reverse}, training: {steps: 3, groupsPerStep: 2}, evaluation: {tasks: 0}}"
    (tmp_path / "job.yaml").write_text(f"{head}{pool}\n---\n{head}RLJob\nmetadata: {{name: a}}\nspec: {spec}\n")
    said = CliRunner().invoke(build(["validate"]), ["validate", "job.yaml", "--estimate"])
    assert "estimate of default/a: 48 training episodes, at most 98,000 tokens; its time is not known" in said.output
