"""Drift, of every kind of object that we own: it is put back when somebody deletes or edits it, and what others have added stays, inside the spec too."""

from typing import Any

import pytest
from tests.operator.objects import SYSTEM
from tests.operator.real.harness import OperatorHarness, eventually
from tests.operator.real.orchestrators import ScriptedOrchestrator

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
OURS = list(dict.fromkeys(target for target, _ in EDITS))


@pytest.fixture
async def settled(harness: OperatorHarness, orchestrator: ScriptedOrchestrator) -> OperatorHarness:
    """A pool and a running job, with all that they own."""
    await harness.run_job(orchestrator)
    for target in OURS:
        await eventually(harness, f"{target} is there", lambda target=target: harness.get(target))
    return harness


def at(body: Any, edit: Any) -> Any:
    """Of an object, the part that an edit names."""
    if not isinstance(edit, dict):
        return body
    return {key: at((body or {}).get(key), value) for key, value in edit.items()}


async def has(harness: OperatorHarness, target: Target, wanted: Any) -> None:
    """Wait until an object has these fields again."""
    look = harness.gateway.get
    await eventually(
        harness, f"{target} has {wanted}", lambda: look(target), accept=lambda body: at(body, wanted) == wanted
    )


async def test_what_was_deleted_comes_back(settled: OperatorHarness) -> None:
    before = {target: (await settled.gateway.get(target))["metadata"]["uid"] for target in OURS}
    for target in OURS:
        await settled.gateway.delete(target)
    for target, uid in before.items():
        await eventually(
            settled,
            f"{target} is back",
            lambda target=target: settled.get(target),
            accept=lambda body, uid=uid: body is not None and body["metadata"]["uid"] != uid,
        )


async def test_every_edit_of_what_we_set_is_undone(settled: OperatorHarness) -> None:
    before = {target: await settled.gateway.get(target) for target in OURS}
    for target, edit in EDITS:
        after = await settled.gateway.patch(target, edit)
        assert at(after, edit) != at(before[target], edit), f"{edit} of {target} changes nothing"
    for target, edit in EDITS:
        await has(settled, target, at(before[target], edit))


async def test_what_others_add_inside_stays_while_ours_is_put_right(settled: OperatorHarness) -> None:
    """As `kubectl rollout restart`, a mesh's injector and a policy engine do."""
    labels, restarted = {"example.com/mesh": "on"}, {"kubectl.kubernetes.io/restartedAt": "2026-11-21T20:00:00Z"}
    dns = {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["10.0.0.10"]}}
    template = {"metadata": {"annotations": restarted, "labels": labels}, "spec": dns}
    for target in (SANDBOX, WORKERS):
        await settled.gateway.patch(target, {"spec": {"template": template}})
        await settled.gateway.patch(target, {"spec": {"replicas": 5}})
    for target in (SANDBOX, WORKERS):
        await has(settled, target, {"spec": {"replicas": 1}})
        assert at((await settled.gateway.get(target))["spec"]["template"], template) == template


async def test_an_object_that_only_others_changed_is_not_written_again(settled: OperatorHarness) -> None:
    for target in OURS:
        await settled.gateway.patch(target, {"metadata": {"annotations": {"example.com/note": "theirs"}}})
    theirs = {target: (await settled.gateway.get(target))["metadata"]["resourceVersion"] for target in OURS}
    await settled.gateway.patch(SANDBOX, {"spec": {"replicas": 3}})
    await has(settled, SANDBOX, {"spec": {"replicas": 1}})
    for target, version in theirs.items():
        if target != SANDBOX:
            assert (await settled.gateway.get(target))["metadata"]["resourceVersion"] == version, target
