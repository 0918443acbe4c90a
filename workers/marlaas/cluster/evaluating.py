"""`kubectl marlaas eval`: a cluster's jobs without a training step, and their results. Pure."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from marlaas.cluster.views import ClusterJobView
from marlaas.manifest.findings import Placed
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import RLJob
from marlaas_api.kinds.problems import parse
from marlaas_api.kinds.status import SuiteStatus


def only_evaluating(placed: Placed[RLJob], adapters: Mapping[str, str], suffix: str) -> Placed[RLJob]:
    """Return the job under the name `NAME-suffix`, with 0 steps and without exports.

    Args:
        adapters: paths on the pool's workers, by agent, that replace `initFrom`; the name is empty for the only policy of the job.

    Raises:
        InvalidInput: it has no evaluation, its name becomes none, or no agent has the name of an adapter.
    """
    source = placed.source
    spec, name = placed.object.spec, placed.object.metadata.name
    if not spec.evaluation.tasks and not spec.evaluation.suites:
        raise InvalidInput(
            f"job {name}: spec.evaluation.tasks is 0, so there is nothing to evaluate; set tasks or suites"
        )
    whole = deepcopy(source.document.value)
    body = whole
    for step in source.prefix:
        body = body[step]
    body["metadata"]["name"] = f"{name}-{suffix}"
    body["spec"]["training"]["steps"] = 0
    for key in ("export", "suspend", "ttlSecondsAfterFinished"):
        body["spec"].pop(key, None)
    _begin_with(body["spec"], _by_agent(placed.object, adapters))
    changed = replace(source, document=replace(source.document, value=whole))
    return Placed(parse(RLJob, body), changed)


def _by_agent(job: RLJob, adapters: Mapping[str, str]) -> dict[str, str]:
    policies = [agent.name for agent in job.spec.agents if agent.policy is None]
    if "" in adapters and len(policies) > 1:
        raise InvalidInput(
            f"job {job.metadata.name} has the agents {', '.join(policies)}: name the adapter's with --adapter AGENT=PATH"
        )
    if unknown := [name for name in adapters if name and name not in policies]:
        raise InvalidInput(
            f"--adapter {unknown[0]}=…: job {job.metadata.name} has no such agent; it has {', '.join(policies)}"
        )
    return {name or policies[0]: path for name, path in adapters.items()}


def _begin_with(spec: dict[str, Any], adapters: Mapping[str, str]) -> None:
    """Let agents begin with adapters, and none with supervised fine-tuning, which would be training."""
    if adapters and not spec.get("agents"):
        spec["agents"] = [{"name": "policy"}]
    for agent in spec.get("agents") or []:
        path = adapters.get(agent["name"], (agent.get("initFrom") or {}).get("path"))
        agent.pop("initFrom", None)
        if path is not None:
            agent["initFrom"] = {"path": path}


def results(view: ClusterJobView) -> Iterator[str]:
    """Yield the results of a job that was evaluated: a line for each suite, or one of its mean reward."""
    status = view.status
    if status is None or status.phase != "Succeeded":
        return
    if status.suites:
        yield from (f"{view.key}: {_suite(one)}" for one in status.suites)
    elif status.eval_last is not None or status.eval_before is not None:
        found = status.eval_last if status.eval_last is not None else status.eval_before
        yield f"{view.key}: mean reward {found:.3f}"


def _suite(suite: SuiteStatus) -> str:
    found = suite.last if suite.last is not None else suite.before
    parts = [f"{suite.name} {'·' if found is None else f'{found:.3f}'}"]
    parts[0] += "" if suite.standard_error is None else f" ± {suite.standard_error:.2g}"
    parts += [
        f"pass@{k} {value:.3f}" for k, value in sorted((suite.pass_at or {}).items(), key=lambda one: int(one[0]))
    ]
    parts += [] if suite.majority is None else [f"majority {suite.majority:.3f}"]
    return ", ".join(parts)
