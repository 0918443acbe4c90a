"""Drift, of every kind of object that we own: it is put back when somebody deletes or edits it, and what others have added stays, inside the spec too."""

from tests.operator.objects import SYSTEM
from tests.operator.real.harness import eventually
from tests.tables import rows

from marlaas_operator.cluster import Target
from marlaas_operator.cluster.resources import DEPLOYMENTS, OWNED, STATEFULSETS

SANDBOX = Target(DEPLOYMENTS, "team-a", "one-sandbox")
WORKERS = Target(STATEFULSETS, SYSTEM, "tiny-rollout")
KINDS = {resource.kind: resource for resource in OWNED}
EDITS = [(Target(KINDS[kind], place, name), edit) for place, kind, name, edit in rows(__file__, "edits")]
OURS = list(dict.fromkeys(target for target, _ in EDITS))


def at(body, edit):
    """Of an object, the part that an edit names."""
    if not isinstance(edit, dict):
        return body
    return {key: at((body or {}).get(key), value) for key, value in edit.items()}


async def has(harness, target, wanted):
    """Wait until an object has these fields again."""
    look = harness.gateway.get
    accept = lambda body: at(body, wanted) == wanted  # noqa: E731
    await eventually(harness, f"{target} has {wanted}", lambda: look(target), accept=accept)


async def test_drift_is_put_right_and_what_others_add_stays(harness, orchestrator):
    await harness.run_job(orchestrator)
    for target in OURS:
        await eventually(harness, f"{target} is there", lambda target=target: harness.get(target))
    await an_object_that_only_others_changed_is_not_written_again(harness)
    await every_edit_of_what_we_set_is_undone(harness)
    await what_others_add_inside_stays_while_ours_is_put_right(harness)
    await what_was_deleted_comes_back(harness)


async def an_object_that_only_others_changed_is_not_written_again(harness):
    for target in OURS:
        await harness.gateway.patch(target, {"metadata": {"annotations": {"example.com/note": "theirs"}}})
    theirs = {target: (await harness.gateway.get(target))["metadata"]["resourceVersion"] for target in OURS}
    await harness.gateway.patch(SANDBOX, {"spec": {"replicas": 3}})
    await has(harness, SANDBOX, {"spec": {"replicas": 1}})
    for target, version in theirs.items():
        if target != SANDBOX:
            assert (await harness.gateway.get(target))["metadata"]["resourceVersion"] == version, target


async def every_edit_of_what_we_set_is_undone(harness):
    before = {target: await harness.gateway.get(target) for target in OURS}
    for target, edit in EDITS:
        after = await harness.gateway.patch(target, edit)
        assert at(after, edit) != at(before[target], edit), f"{edit} of {target} changes nothing"
    for target, edit in EDITS:
        await has(harness, target, at(before[target], edit))


async def what_others_add_inside_stays_while_ours_is_put_right(harness):
    """As `kubectl rollout restart`, a mesh's injector and a policy engine do."""
    labels, restarted = {"example.com/mesh": "on"}, {"kubectl.kubernetes.io/restartedAt": "2026-11-21T20:00:00Z"}
    dns = {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["10.0.0.10"]}}
    template = {"metadata": {"annotations": restarted, "labels": labels}, "spec": dns}
    for target in (SANDBOX, WORKERS):
        await harness.gateway.patch(target, {"spec": {"template": template}})
        await harness.gateway.patch(target, {"spec": {"replicas": 5}})
    for target in (SANDBOX, WORKERS):
        await has(harness, target, {"spec": {"replicas": 1}})
        assert at((await harness.gateway.get(target))["spec"]["template"], template) == template


async def what_was_deleted_comes_back(harness):
    before = {target: (await harness.gateway.get(target))["metadata"]["uid"] for target in OURS}
    for target in OURS:
        await harness.gateway.delete(target)
    for target, uid in before.items():
        is_new = lambda body, uid=uid: body is not None and body["metadata"]["uid"] != uid  # noqa: E731
        await eventually(harness, f"{target} is back", lambda target=target: harness.get(target), accept=is_new)
