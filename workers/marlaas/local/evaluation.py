"""`marlaas eval`: the jobs of a run without a training step, each with the adapters that are to be evaluated. Pure but for reading adapters' settings."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from marlaas.local.documents import DesiredState
from marlaas.manifest.references import adapter_shape
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import JobDocument
from marlaas_api.messages.agent_settings import AdapterSettings, AgentSettings, InitSettings
from marlaas_api.messages.job_spec import ExportSettings

Adapters = Mapping[str, Path]
"""Folders of adapters by agent; the name is empty for the only policy of a job. An agent without one is what the manifest says."""


def only_evaluating(wanted: DesiredState, adapters: Adapters) -> DesiredState:
    """Return the jobs with 0 steps, beginning with these adapters, and without exports.

    Raises:
        InvalidInput: a job has no evaluation, an adapter is none, or no agent of a job has the name of one.
    """
    return replace(wanted, jobs=tuple(_only_evaluating(job, adapters) for job in wanted.jobs))


def _only_evaluating(job: JobDocument, adapters: Adapters) -> JobDocument:
    spec = job.spec
    if not spec.evaluation.plan:
        raise InvalidInput(
            f"job {job.ref}: spec.evaluation.tasks is 0, so there is nothing to evaluate; set tasks or suites"
        )
    policies = [agent.name for agent in spec.policies]
    if "" in adapters and len(policies) > 1:
        raise InvalidInput(
            f"job {job.ref} has the agents {', '.join(policies)}: name the adapter's with --adapter AGENT=DIR"
        )
    if unknown := [name for name in adapters if name and name not in policies]:
        raise InvalidInput(f"--adapter {unknown[0]}=…: job {job.ref} has no such agent; it has {', '.join(policies)}")
    given = {name or policies[0]: folder for name, folder in adapters.items()}
    agents = tuple(_with(agent, given[agent.name]) if agent.name in given else agent for agent in spec.agents)
    training = spec.training.model_copy(update={"steps": 0})
    changed = {"agents": agents, "training": training, "export": ExportSettings()}
    return job.model_copy(update={"spec": spec.model_copy(update=changed)})


def _with(agent: AgentSettings, folder: Path) -> AgentSettings:
    rank, alpha = adapter_shape(folder)
    shape = AdapterSettings(rank=rank, alpha=alpha)
    return agent.model_copy(update={"adapter": shape, "init_from": InitSettings(path=str(folder.absolute()))})
