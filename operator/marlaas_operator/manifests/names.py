"""Names, labels and owner references of the objects that the operator creates."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from marlaas_api.kinds import API_VERSION
from marlaas_api.kinds.environment import RESERVED_ENDING
from marlaas_operator.plan import Manifest
from marlaas_operator.pod_facts import COMPONENT as COMPONENT
from marlaas_operator.snapshot import Meta

MANAGER = "marlaas-operator"
"""Field manager of every server-side apply, and value of the label that selects our objects."""

MANAGED_BY = "app.kubernetes.io/managed-by"
NAME = "app.kubernetes.io/name"
INSTANCE = "app.kubernetes.io/instance"
POOL, JOB, JOB_UID = "marlaas.dev/pool", "marlaas.dev/job", "marlaas.dev/job-uid"
DESIRED_HASH = "marlaas.dev/desired-hash"
SECRET_HASH = "marlaas.dev/secret-hash"
"""Annotation on the workload that mounts a Secret: hash of the Secret's content when last applied. Secrets are
never read.
"""

ROLES = ("rollout", "trainer")
_LABEL = 63
_STATEFUL_SET = 52
"""Longest name of a StatefulSet: its pods have the label `<name>-<10 characters>` of at most 63."""


def sandbox_name(job: str) -> str:
    """Return the name of all objects that a job owns in its namespace.

    Its ending is reserved: a job cannot mount another job's Secret by `SecretRef`
    (`marlaas_api.kinds.environment`).
    """
    return f"{_fitted(job, _LABEL - len(RESERVED_ENDING))}{RESERVED_ENDING}"


def workers_name(pool: str, role: str) -> str:
    """Return the name of a pool's objects for one role, in the release's namespace.

    A Service's name must begin with a letter; a pool's may begin with a digit, and then gets a prefix.
    """
    if pool[0].isdigit():
        return _cut(f"p-{pool}-{role}", _STATEFUL_SET)
    return _fitted(f"{pool}-{role}", _STATEFUL_SET)


def accounts_name(pool: str) -> str:
    """Return the name of the pool's ServiceAccount."""
    return _fitted(f"{pool}-workers", _LABEL)


def document_name(pool: str) -> str:
    """Return the name of the ConfigMap with the pool's document."""
    return _fitted(f"{pool}-pool", _LABEL)


def labels(release: str, component: str, owner: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of an owned object and of its pods. owner: POOL, or POOL, JOB and JOB_UID."""
    return {NAME: "marlaas", COMPONENT: component, INSTANCE: release, MANAGED_BY: MANAGER, **owner}


def owner_reference(kind: str, meta: Meta) -> dict[str, Any]:
    """Return the reference to an object's owner.

    Kubernetes deletes the object after its owner, even without the operator.
    """
    return {"apiVersion": API_VERSION, "kind": kind, "name": meta.name, "uid": meta.uid, "controller": True}


def digest(value: object) -> str:
    """Return a short hash of a JSON value, independent of the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def stamped(manifest: Manifest) -> Manifest:
    """Return the manifest with its hash as annotation.

    The hash reveals a new desired state however the server normalizes fields.
    """
    meta = manifest["metadata"]
    annotations = {**meta.get("annotations", {}), DESIRED_HASH: digest(manifest)}
    return {**manifest, "metadata": {**meta, "annotations": annotations}}


def _fitted(name: str, longest: int) -> str:
    return name if len(name) <= longest else _cut(name, longest)


def _cut(name: str, longest: int) -> str:
    """Cut a name to a length; it ends in 8 hex digits of its hash."""
    return f"{name[: longest - 9].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
