"""Metrics of the orchestrator: jobs by phase, progress and usage of each admitted job, and usage of each tenant. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from marlaas_api.messages import Phase, Progress, TokenUse, UsageAmounts
from marlaas_worker.metrics import Sample, of_job


def samples(
    all_progress: Iterable[Progress], leads: bool, tenants: Mapping[str, UsageAmounts] | None = None
) -> list[Sample]:
    """Return all metrics of the orchestrator, as samples.

    Args:
        all_progress: the progress of every job. Only admitted jobs have samples of their own.
        leads: whether this replica holds the lease; a standby reports neither jobs nor tenants.
        tenants: total usage by tenant; None: no tenants.
    """
    known = list(all_progress) if leads else []
    phases = Counter(progress.phase for progress in known)
    found = [Sample("marlaas_orchestrator_leads", "gauge", "1 while this replica holds the lease.", float(leads))]
    for phase in Phase:
        labels = {"phase": phase.value}
        found.append(Sample("marlaas_jobs", "gauge", "Jobs by phase.", phases[phase], labels))
    for progress in known:
        if progress.admitted:
            found += _of_job(progress)
            found += _of_agents(progress)
            for agent, amounts in sorted(progress.usage.items()):
                labels = {**of_job(progress.ref), "agent": agent}
                found += _tokens("job", amounts, {**labels, "tenant": progress.tenant})
                found += _held(amounts, labels)
    for tenant, amounts in (tenants or {}).items() if leads else ():
        found += _tokens("tenant", amounts, {"tenant": tenant})
        found += _seconds(amounts, {"tenant": tenant})
        text = "Bytes that the tenant's jobs keep in the blob store."
        found.append(Sample("marlaas_tenant_stored_bytes", "gauge", text, amounts.stored_bytes, {"tenant": tenant}))
    return found


def _of_agents(progress: Progress) -> Iterator[Sample]:
    """Yield the samples of reward, evaluation, staleness and version of each agent of a job.

    Their metrics have other names than those of the job, so that a sum over a job's series counts no value twice.
    """
    for name, agent in progress.agents.items():
        labels = {**of_job(progress.ref), "agent": name}
        values = {
            "reward": ("Mean reward of the agent in the last step.", agent.reward),
            "evaluation": ("Mean reward of the agent on held-out tasks, newest.", agent.eval_last),
            "staleness": ("Mean staleness of the agent's groups in the last step, in versions.", agent.staleness),
            "version": ("Newest committed version of the agent's policy.", progress.versions.get(name)),
        }
        for key, (text, value) in values.items():
            if value is not None:
                yield Sample(f"marlaas_agent_{key}", "gauge", text, value, labels)


def _held(amounts: UsageAmounts, labels: Mapping[str, str]) -> Iterator[Sample]:
    """Yield the samples of an agent's adapter-slot seconds and of the bytes that it keeps in the blob store."""
    text = "Seconds for which versions of the agent had adapter slots."
    yield Sample("marlaas_agent_slot_seconds_total", "counter", text, amounts.slot_s, labels)
    text = "Bytes that the agent keeps in the blob store."
    yield Sample("marlaas_agent_stored_bytes", "gauge", text, amounts.stored_bytes, labels)


def _tokens(of: str, amounts: UsageAmounts, labels: Mapping[str, str]) -> Iterator[Sample]:
    """Yield the samples of the token counters of an agent of a job, or of a tenant. of: `job` or `tenant`, a part of the counters' names.

    Open tokens are left out, because their number decreases when a step finishes, and a counter must not decrease.
    """
    prompt, name = "Tokens of prompts.", f"marlaas_{of}_prompt_tokens_total"
    yield Sample(name, "counter", prompt, amounts.prompt_tokens, labels)
    prompt, name = "Tokens of prompts from the prefix cache.", f"marlaas_{of}_cached_tokens_total"
    yield Sample(name, "counter", prompt, amounts.cached_tokens, labels)
    text, name = "Generated tokens by what became of them.", f"marlaas_{of}_used_tokens_total"
    for use in TokenUse:
        if use is not TokenUse.OPEN:
            kind = {"use": use.value.removesuffix("_tokens")}
            yield Sample(name, "counter", text, getattr(amounts, use.value), {**labels, **kind})


def _seconds(amounts: UsageAmounts, labels: Mapping[str, str]) -> Iterator[Sample]:
    seconds = {
        "engine": amounts.engine_s,
        "preempted_engine": amounts.preempted_engine_s,
        "trainer": amounts.trainer_s,
        "sandbox": amounts.sandbox_s,
        "slot": amounts.slot_s,
        "admitted": amounts.admitted_s,
    }
    for resource, used_s in seconds.items():
        text = "Seconds of engines, trainers, sandboxes and adapter slots, and seconds for which jobs were admitted."
        yield Sample("marlaas_tenant_seconds_total", "counter", text, used_s, {**labels, "resource": resource})


def _of_job(progress: Progress) -> list[Sample]:
    labels = of_job(progress.ref)
    found = [
        Sample("marlaas_job_steps_total", "counter", "Finished steps.", progress.step, labels),
        Sample("marlaas_job_tokens_total", "counter", "Generated tokens.", progress.tokens, labels),
        Sample("marlaas_job_accelerator_seconds_total", "counter", "Engine seconds.", progress.accelerator_s, labels),
        Sample(
            "marlaas_job_outstanding_groups",
            "gauge",
            "Groups given out, not trained yet.",
            progress.num_outstanding,
            labels,
        ),
        Sample(
            "marlaas_job_staleness",
            "gauge",
            "Mean staleness of the last step, in versions.",
            progress.staleness,
            labels,
        ),
    ]
    if progress.reward is not None:
        found.append(Sample("marlaas_job_reward", "gauge", "Mean reward of the last step.", progress.reward, labels))
    for fault, number in sorted(progress.faults.items()):
        text = "Episodes that did not count, by class."
        found.append(Sample("marlaas_job_faults_total", "counter", text, number, {**labels, "class": fault}))
    for fault, number in sorted(progress.training_faults.items()):
        text = "Faults of training that cost no step, by class."
        found.append(Sample("marlaas_job_training_faults_total", "counter", text, number, {**labels, "class": fault}))
    return found
