"""Drift: what we own is put back when somebody deletes or edits it; what others added to it is left alone."""

import pytest
from tests.operator.real.harness import OperatorHarness, eventually
from tests.operator.real.orchestrators import ScriptedOrchestrator

from marlaas_operator.cluster import Body, Target
from marlaas_operator.cluster.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    NETWORK_POLICIES,
    SERVICE_ACCOUNTS,
    SERVICES,
    STATEFULSETS,
)

SYSTEM = "marlaas-system"
OURS = [
    Target(DEPLOYMENTS, "team-a", "one-sandbox"),
    Target(NETWORK_POLICIES, "team-a", "one-sandbox"),
    Target(SERVICE_ACCOUNTS, "team-a", "one-sandbox"),
    Target(STATEFULSETS, SYSTEM, "tiny-rollout"),
    Target(STATEFULSETS, SYSTEM, "tiny-trainer"),
    Target(SERVICES, SYSTEM, "tiny-rollout"),
    Target(DISRUPTION_BUDGETS, SYSTEM, "tiny-rollout"),
    Target(NETWORK_POLICIES, SYSTEM, "tiny-rollout"),
    Target(SERVICE_ACCOUNTS, SYSTEM, "tiny-workers"),
    Target(CONFIG_MAPS, SYSTEM, "tiny-pool"),
]


@pytest.fixture
async def settled(harness: OperatorHarness, orchestrator: ScriptedOrchestrator) -> OperatorHarness:
    """A pool and a running job, with all that they own."""
    await harness.run_job(orchestrator)

    async def complete() -> bool:
        return all([await harness.get(target) for target in OURS])

    await eventually(harness, "everything is there", complete)
    return harness


async def test_what_was_deleted_comes_back(settled: OperatorHarness) -> None:
    before = {target: await settled.gateway.get(target) for target in OURS}
    for target in OURS:
        await settled.gateway.delete(target)
    for target in OURS:

        async def back(target: Target = target) -> bool:
            body = await settled.get(target)
            return body is not None and body["metadata"]["uid"] != before[target]["metadata"]["uid"]

        await eventually(settled, f"{target} is back", back)


async def test_what_was_edited_is_put_right_and_foreign_fields_stay(settled: OperatorHarness) -> None:
    theirs = {"metadata": {"annotations": {"example.com/note": "ours"}, "labels": {"example.com/team": "x"}}}
    for target in OURS:
        await settled.gateway.patch(target, theirs)
    edits: list[tuple[Target, Body]] = [
        (OURS[0], {"spec": {"replicas": 7}}),
        (OURS[1], {"spec": {"egress": [{}]}}),
        (OURS[3], {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 1}}}}),
        (OURS[9], {"data": {"pool.json": "{}"}}),
    ]
    before = {target: await settled.gateway.get(target) for target, _ in edits}
    for target, patch in edits:
        await settled.gateway.patch(target, patch)
    for target, patch in edits:
        key = next(iter(patch))

        async def right(target: Target = target, key: str = key) -> bool:
            return bool((await settled.gateway.get(target))[key] == before[target][key])

        await eventually(settled, f"{target} is as before", right)
    for target in OURS:
        metadata = (await settled.gateway.get(target))["metadata"]
        assert metadata["annotations"]["example.com/note"] == "ours"
        assert metadata["labels"]["example.com/team"] == "x"
