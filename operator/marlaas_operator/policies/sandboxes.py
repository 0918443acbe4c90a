"""Actions for a job's sandbox: create, repair, delete. A job that is not admitted has no sandbox.

Objects are created in the order ServiceAccount, NetworkPolicy, Secret, Deployment, so that tenant code never
runs unprotected. Deletion takes the Deployment first and the rest once no pod is left. The ServiceAccount goes
last: while it exists, a Secret, which the operator cannot read, may exist too.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from marlaas_api.messages import JobDocument
from marlaas_operator.installation import Installation
from marlaas_operator.manifests.names import sandbox_name
from marlaas_operator.manifests.sandbox import sandbox_objects, sandbox_secret
from marlaas_operator.manifests.sandbox_pod import Sandbox
from marlaas_operator.plan import Action, Delete
from marlaas_operator.policies import child_reconcile
from marlaas_operator.snapshot import JobSnapshot


def is_wanted(snapshot: JobSnapshot) -> bool | None:
    """Return whether the job should have a sandbox; None if its progress is unknown."""
    progress = snapshot.own_progress
    if progress is None:
        return False if snapshot.progress_known else None
    return progress.admitted and not progress.phase.final


def plan_sandbox(
    snapshot: JobSnapshot, wanted: JobDocument | None, installation: Installation, now: float
) -> tuple[Action, ...]:
    """Return the actions that create, update or delete the job's sandbox."""
    should = is_wanted(snapshot)
    if should is None:
        return ()
    if not should:
        return tuple(removal(snapshot))
    document = wanted or snapshot.own_document  # for a job that no longer parses: the published document
    if document is None or snapshot.credential is None:
        return ()
    if snapshot.pool is None:  # pool deleted by force, or invalid: its sandbox bounds are unknown, not absent
        return ()
    sandbox = Sandbox(snapshot.meta, document, snapshot.pool.spec.sandbox, snapshot.credential)
    objects = sandbox_objects(sandbox, installation)
    secret = child_reconcile.Mounted(sandbox_secret(sandbox, installation), snapshot.pods)
    return tuple(child_reconcile.towards(objects, snapshot.owned, snapshot.meta.uid, secret, now))


def removal(snapshot: JobSnapshot) -> Iterator[Action]:
    """Yield the actions that delete the sandbox."""
    if not snapshot.owned:
        return
    name = sandbox_name(snapshot.meta.name)
    deployment = snapshot.owned.get(("Deployment", name))
    if deployment is not None:
        yield from _delete("Deployment", deployment)
    elif not snapshot.pods:
        yield Delete("Secret", snapshot.meta.namespace, name)
        for kind in ("NetworkPolicy", "ServiceAccount"):
            yield from _delete(kind, snapshot.owned.get((kind, name)))


def _delete(kind: str, observed: Mapping[str, Any] | None) -> Iterator[Action]:
    """Delete an object, unless it is absent or already being deleted."""
    meta = observed["metadata"] if observed is not None else {}
    if meta and not meta.get("deletionTimestamp"):
        yield Delete(kind, meta["namespace"], meta["name"], meta["uid"])
