"""Drift, of every kind of object that we own: an edit of what we set is undone, and what others have added stays, inside the spec too."""

from typing import Any

import pytest
from tests.operator.real.harness import SYSTEM, OperatorHarness, eventually
from tests.operator.real.orchestrators import ADMITTED, ScriptedOrchestrator

from marlaas_operator.cluster import Target
from marlaas_operator.cluster.resources import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    NETWORK_POLICIES,
    SERVICE_ACCOUNTS,
    SERVICES,
    STATEFULSETS,
)

SANDBOX = Target(DEPLOYMENTS, "team-a", "one-sandbox")
WORKERS = Target(STATEFULSETS, SYSTEM, "tiny-rollout")

EDITS: list[tuple[Target, dict[str, Any]]] = [
    (SANDBOX, {"spec": {"template": {"spec": {"automountServiceAccountToken": True}}}}),
    (SANDBOX, {"spec": {"template": {"spec": {"securityContext": {"runAsNonRoot": False}}}}}),
    (SANDBOX, {"metadata": {"labels": {"marlaas.dev/job": "other"}}}),
    (Target(NETWORK_POLICIES, "team-a", "one-sandbox"), {"spec": {"policyTypes": ["Ingress"]}}),
    (Target(NETWORK_POLICIES, "team-a", "one-sandbox"), {"spec": {"ingress": [{}]}}),
    (Target(SERVICE_ACCOUNTS, "team-a", "one-sandbox"), {"automountServiceAccountToken": True}),
    (WORKERS, {"spec": {"replicas": 0}}),
    (WORKERS, {"metadata": {"ownerReferences": None}}),
    (Target(STATEFULSETS, SYSTEM, "tiny-trainer"), {"spec": {"updateStrategy": {"type": "OnDelete"}}}),
    (Target(SERVICES, SYSTEM, "tiny-trainer"), {"spec": {"selector": {"marlaas.dev/pool": "other"}}}),
    (Target(DISRUPTION_BUDGETS, SYSTEM, "tiny-trainer"), {"spec": {"maxUnavailable": 0}}),
    (Target(NETWORK_POLICIES, SYSTEM, "tiny-trainer"), {"spec": {"egress": [{}]}}),
    (Target(SERVICE_ACCOUNTS, SYSTEM, "tiny-workers"), {"automountServiceAccountToken": True}),
    (Target(CONFIG_MAPS, SYSTEM, "tiny-pool"), {"data": {"pool.json": "{}"}}),
]


@pytest.fixture
async def settled(harness: OperatorHarness, orchestrator: ScriptedOrchestrator) -> OperatorHarness:
    """A pool and a running job, with all that they own."""
    await harness.queue_job()
    await orchestrator.say("team-a", "one", **ADMITTED)

    async def complete() -> bool:
        return all([await harness.get(target) for target, _ in EDITS])

    await eventually(harness, "everything is there", complete)
    return harness


def at(body: Any, edit: Any) -> Any:
    """Of an object, the part that an edit names."""
    if not isinstance(edit, dict):
        return body
    return {key: at((body or {}).get(key), value) for key, value in edit.items()}


async def test_every_edit_of_what_we_set_is_undone(settled: OperatorHarness) -> None:
    before = {target: await settled.gateway.get(target) for target, _ in EDITS}
    for target, edit in EDITS:
        after = await settled.gateway.patch(target, edit)
        assert at(after, edit) != at(before[target], edit), f"{edit} of {target} changes nothing"
    for target, edit in EDITS:

        async def undone(target: Target = target, edit: dict[str, Any] = edit) -> bool:
            return bool(at(await settled.gateway.get(target), edit) == at(before[target], edit))

        await eventually(settled, f"{edit} of {target} is undone", undone)


async def test_what_others_add_inside_stays_while_ours_is_put_right(settled: OperatorHarness) -> None:
    """As `kubectl rollout restart`, a mesh's injector and a policy engine do."""
    restarted = {"kubectl.kubernetes.io/restartedAt": "2026-11-21T20:00:00Z"}
    theirs: dict[str, Any] = {
        "spec": {
            "template": {
                "metadata": {"annotations": restarted, "labels": {"example.com/mesh": "on"}},
                "spec": {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["10.0.0.10"]}},
            }
        }
    }
    for target in (SANDBOX, WORKERS):
        await settled.gateway.patch(target, theirs)
        await settled.gateway.patch(target, {"spec": {"replicas": 5}})
    for target in (SANDBOX, WORKERS):

        async def right(target: Target = target) -> bool:
            return bool((await settled.gateway.get(target))["spec"]["replicas"] == 1)

        await eventually(settled, f"{target} has its one replica", right)
        template = (await settled.gateway.get(target))["spec"]["template"]
        assert restarted.items() <= template["metadata"]["annotations"].items()
        assert template["metadata"]["labels"]["example.com/mesh"] == "on"
        assert template["spec"]["dnsConfig"] == {"nameservers": ["10.0.0.10"]}


async def test_an_object_that_only_others_changed_is_not_written_again(settled: OperatorHarness) -> None:
    for target, _ in EDITS:
        await settled.gateway.patch(target, {"metadata": {"annotations": {"example.com/note": "theirs"}}})
    theirs = {target: (await settled.gateway.get(target))["metadata"]["resourceVersion"] for target, _ in EDITS}
    await settled.gateway.patch(SANDBOX, {"spec": {"replicas": 3}})

    async def right() -> bool:
        return bool((await settled.gateway.get(SANDBOX))["spec"]["replicas"] == 1)

    await eventually(settled, "the operator has looked at the job again", right)
    for target, version in theirs.items():
        if target != SANDBOX:
            assert (await settled.gateway.get(target))["metadata"]["resourceVersion"] == version, target
