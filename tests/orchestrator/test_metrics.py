"""The orchestrator's figures, as Prometheus reads them."""

from tests.tables import data

from marlaas_api.health import exposition
from marlaas_api.messages import Phase, Progress, UsageAmounts
from marlaas_worker.health import families
from marlaas_worker.orchestrator.metrics import samples


def level(job: str, phase: Phase, **more: object) -> Progress:
    base = {"namespace": "team-a", "job": job, "uid": job, "phase": phase, "admitted": False, "reason": "R", "steps": 9}
    return Progress.model_validate({**base, **more})


def test_jobs_are_counted_by_phase_and_those_that_run_have_figures_of_their_own():
    faults = {"faults": {"env": 2, "infra": 1}, "training_faults": {"non-finite": 4}}
    running = level("a", Phase.RUNNING, admitted=True, step=3, tokens=70, reward=0.25, **faults)
    found = samples([running, level("b", Phase.QUEUED), level("c", Phase.QUEUED)], leads=True)
    page = exposition(families(found)).splitlines()
    assert [line for line in page if 'job="' in line] == data(__file__, "job_samples")
    head = {"marlaas_orchestrator_leads 1.0", 'marlaas_jobs{phase="Queued"} 2.0', 'marlaas_jobs{phase="Failed"} 0.0'}
    assert head <= set(page)


def test_usage_is_told_by_agent_and_by_tenant_and_open_tokens_are_not():
    used = UsageAmounts(prompt_tokens=9, cached_tokens=4, generated_tokens=7, trained_tokens=2, stale_tokens=1)
    held = used.model_copy(update={"slot_s": 6.5, "stored_bytes": 55})
    running = level("a", Phase.RUNNING, admitted=True, tokens=7, tenant="acme", usage={"policy": held})
    others = {f"{resource}_s": used_s for resource, used_s in data(__file__, "seconds").items()}
    all_used = used.model_copy(update={**others, "open_tokens": 4, "stored_bytes": 99})
    page = exposition(families(samples([running], leads=True, tenants={"acme": all_used}))).splitlines()
    assert set(data(__file__, "usage_samples")) <= set(page)
    told = [f'{{resource="{name}",tenant="acme"}} {used_s}' for name, used_s in data(__file__, "seconds").items()]
    prefix = "marlaas_tenant_seconds_total"
    assert [line.removeprefix(prefix) for line in page if line.startswith(f"{prefix}{{")] == told
    assert not [line for line in page if 'use="open"' in line]
    standby = exposition(families(samples([running], leads=False, tenants={"acme": all_used})))
    assert "marlaas_orchestrator_leads 0.0" in standby
    assert ("job=" in standby, "tenant=" in standby) == (False, False)
