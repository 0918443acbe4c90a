"""What of a job's sandbox is to be made, put right or removed. A job that is not admitted has none.

Made in the order ServiceAccount, NetworkPolicy, Secret, Deployment; removed the other way round, all but the Deployment once no pod is left: nothing of the
tenant's ever runs unguarded, and the account, as long as it is seen, says that a Secret, which is not, may be left.
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
    """Whether the job should have a sandbox; None: not known."""
    progress = snapshot.own_progress
    if progress is None:
        return False if snapshot.progress_known else None
    return progress.admitted and not progress.phase.final


def plan_sandbox(
    snapshot: JobSnapshot, wanted: JobDocument | None, installation: Installation, now: float
) -> tuple[Action, ...]:
    """Actions towards the sandbox that the job should have."""
    should = is_wanted(snapshot)
    if should is None:
        return ()
    if not should:
        return tuple(removal(snapshot))
    document = wanted or snapshot.own_document  # of a job that does not parse any more, as it was handed over
    if document is None or snapshot.credential is None:
        return ()
    if snapshot.pool is None:  # gone by force, or not to be read: what locks its sandboxes is unknown, not absent
        return ()
    sandbox = Sandbox(snapshot.meta, document, snapshot.pool.spec.sandbox, snapshot.credential)
    objects = sandbox_objects(sandbox, installation)
    secret = child_reconcile.Mounted(sandbox_secret(sandbox, installation), snapshot.pods)
    return tuple(child_reconcile.towards(objects, snapshot.owned, snapshot.meta.uid, secret, now))


def removal(snapshot: JobSnapshot) -> Iterator[Action]:
    """Remove whatever there is of the sandbox."""
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
    """Delete an object once; what is on its way out is waited for."""
    meta = observed["metadata"] if observed is not None else {}
    if meta and not meta.get("deletionTimestamp"):
        yield Delete(kind, meta["namespace"], meta["name"], meta["uid"])
