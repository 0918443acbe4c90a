"""The orchestrator's figures, as Prometheus reads them."""

from marlaas_api.messages import Phase, Progress
from marlaas_worker.metrics import exposition
from marlaas_worker.orchestrator.metrics import samples


def level(job: str, phase: Phase, **more: object) -> Progress:
    base = {"namespace": "team-a", "job": job, "uid": job, "phase": phase, "admitted": False, "reason": "R", "steps": 9}
    return Progress.model_validate({**base, **more})


def test_jobs_are_counted_by_phase_and_those_that_run_have_figures_of_their_own() -> None:
    faults = {"faults": {"env": 2, "infra": 1}, "training_faults": {"non-finite": 4}}
    running = level("a", Phase.RUNNING, admitted=True, step=3, tokens=70, reward=0.25, **faults)
    page = exposition(samples([running, level("b", Phase.QUEUED), level("c", Phase.QUEUED)], leads=True)).splitlines()
    assert "marlaas_orchestrator_leads 1" in page
    assert 'marlaas_jobs{phase="Queued"} 2' in page
    assert 'marlaas_jobs{phase="Failed"} 0' in page
    assert [line for line in page if 'job="' in line] == [
        'marlaas_job_steps_total{namespace="team-a",job="a"} 3',
        'marlaas_job_tokens_total{namespace="team-a",job="a"} 70',
        'marlaas_job_accelerator_seconds_total{namespace="team-a",job="a"} 0',
        'marlaas_job_outstanding_groups{namespace="team-a",job="a"} 0',
        'marlaas_job_staleness{namespace="team-a",job="a"} 0',
        'marlaas_job_reward{namespace="team-a",job="a"} 0.25',
        'marlaas_job_faults_total{namespace="team-a",job="a",class="env"} 2',
        'marlaas_job_faults_total{namespace="team-a",job="a",class="infra"} 1',
        'marlaas_job_training_faults_total{namespace="team-a",job="a",class="non-finite"} 4',
    ]


def test_a_standby_knows_no_jobs() -> None:
    page = exposition(samples([level("a", Phase.RUNNING, admitted=True)], leads=False))
    assert "marlaas_orchestrator_leads 0" in page
    assert 'job="' not in page
