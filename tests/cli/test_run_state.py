"""`marlaas why JOB --run DIR` about the jobs of a run that does not go on."""

import re
import time
from pathlib import Path

import pytest
from tests.cli.conftest import invoke
from tests.harness import a_progress, job_document

from marlaas.local.folder import OutFolder, RunRecord, hold
from marlaas_api.documents import pool_spec
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import ModelPoolSpec
from marlaas_api.messages import AgentProgress, JobDocument, Phase, PoolDocument, Progress, UsageAmounts

STEPS = {"training": {"steps": 40}}
JOB = job_document("sums", created_at=1000.0, spec=STEPS)
OTHER = job_document("other", created_at=1000.0, spec=STEPS)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def leave(out: Path, *progress: Progress, jobs: tuple[JobDocument, ...] = (JOB, OTHER)) -> None:
    """Leave the folder as a run does that was stopped."""
    pool = PoolDocument(
        name="tiny", model_path="/m", spec=pool_spec(ModelPoolSpec.model_validate({"model": {"builtin": "tiny"}}))
    )
    with hold(out) as folder:
        folder.write_record(RunRecord(jobs=jobs, pools=(pool,), progress=progress))


def why(out: Path, *words: str) -> str:
    result = invoke("why", *(words or ("sums",)), "--run", str(out))
    if result.exception is not None:
        raise result.exception
    return " ".join(result.stdout.split())


def test_a_job_that_was_running_is_told_as_it_was_left(out: Path) -> None:
    agents = {"policy": AgentProgress(reward=0.5)}
    leave(out, a_progress(JOB, reason="Training", step=10, reward=0.5, started_at=1000.0, at=1060.0, agents=agents))
    assert why(out) == (
        f"No `marlaas run` uses {out} now. To continue the run, repeat the command that started it. As it was left: team-a/sums has been running for 1 m 00 s, at step 10 "
        "of 40, reward 0.50. Training: Episodes are played and trained on. There is nothing to do."
    )


def test_a_preempted_job_waits_since_it_was_stopped_for_the_job_that_ends_next(out: Path) -> None:
    waits = {"phase": Phase.QUEUED, "admitted": False, "reason": "Preempted", "message": "preempted by tenant b"}
    leave(
        out,
        a_progress(JOB, **waits, step=3, started_at=1000.0, at=1060.0, steps=40),
        a_progress(OTHER, reason="Training", step=10, started_at=1000.0, admitted_s=50.0, at=1080.0),
    )
    said = why(out)
    assert "team-a/sums has been queued for 0 s, at step 3 of 40. Preempted: The job made room" in said
    assert "the next running job to end is team-a/other, in about 2 m 30 s. There is nothing to do." in said


@pytest.mark.parametrize("reason", ["WaitingForPool", "WaitingForTrainer", "Training"])
def test_a_job_says_for_how_long_it_waits_and_the_advice_is_about_the_run(out: Path, reason: str) -> None:
    leave(out, a_progress(JOB, reason=reason, reason_at=1018.0, admitted_at=1000.0, started_at=1000.0, at=1060.0))
    said = why(out)
    assert "has been running for 1 m 00 s" in said
    assert (f"{reason} (for 42 s): " in said) is (reason != "Training")
    leave(out, a_progress(JOB, phase=Phase.QUEUED, admitted=False, reason="WaitingForPool", at=1060.0))
    said = why(out, "sums", "-n", "team-a")
    assert "team-a/sums has been queued for 1 m 00 s. WaitingForPool: " in said, "since its creation"
    assert said.endswith(f"What to do: Wait while it starts. If it lasts, read the logs in {out}/.state/logs.")


@pytest.mark.parametrize("names", [("policy",), ("solver", "critic")])
def test_a_succeeded_job_says_where_its_adapters_are(out: Path, names: tuple[str, ...]) -> None:
    job = job_document("sums", spec={**STEPS, "agents": [{"name": name} for name in names]})
    agents = {name: AgentProgress(reward=0.25, eval_before=0.0, eval_last=0.5) for name in names}
    usage = {name: UsageAmounts(generated_tokens=0 if name == "critic" else 9) for name in names}
    done = {"phase": Phase.SUCCEEDED, "admitted": False, "reason": "Finished", "step": 40, "finished_at": time.time()}
    versions = dict.fromkeys(names, 40) | ({"critic": 0} if "critic" in names else {})
    leave(out, a_progress(job, **done, versions=versions, agents=agents, usage=usage), jobs=(job,))
    folders = [OutFolder(out).job(job.ref) / "adapter" / (name if len(names) > 1 else "") for name in names]
    for folder in folders:
        folder.mkdir(parents=True)
    said = why(out)
    assert re.match(r"team-a/sums succeeded \d+ s ago, at step 40 of 40, version ", said)
    agent = f" --agent {names[0]}" if len(names) > 1 else ""
    assert f"What to do: Chat with its adapter: `marlaas chat {out} --job team-a/sums{agent}`." in said
    assert said.endswith(" ".join(f"Agent {name}: {folder}." for name, folder in zip(names, folders, strict=True)))
    assert ("Agent critic was called in no episode of 40 steps" in said) is ("critic" in names)


def test_a_failed_job_and_one_that_the_run_gave_up_say_why(out: Path) -> None:
    ended = {"phase": Phase.FAILED, "admitted": False, "finished_at": time.time()}
    leave(
        out,
        a_progress(JOB, **ended, reason="TooManyFaults", message="KeyError: 'x'"),
        a_progress(OTHER, **ended, reason="RoleFailed", message="trainer-0 exited 5 times"),
    )
    assert why(out).endswith("Fix it and start a run with another --out.")
    said = why(out, "other")
    assert "RoleFailed: A process that the job needs failed and is not restarted." in said
    assert "Message: trainer-0 exited 5 times." in said


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("third",), "has no job third: its jobs are team-a/sums, team-a/other"),
        (("sums", "--context", "x"), "--run excludes --context and --kubeconfig"),
    ],
)
def test_what_cannot_be_explained_is_refused(out: Path, words: tuple[str, ...], text: str) -> None:
    leave(out)
    with pytest.raises(InvalidInput, match=text):
        why(out, *words)
