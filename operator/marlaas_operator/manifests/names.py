"""Names, labels and owners of the objects that the operator makes (DESIGN, "Identity": a name carries whose it is)."""

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
"""Field owner of every server-side apply, and value of the label by which our objects are found."""

MANAGED_BY = "app.kubernetes.io/managed-by"
NAME = "app.kubernetes.io/name"
INSTANCE = "app.kubernetes.io/instance"
POOL, JOB, JOB_UID = "marlaas.dev/pool", "marlaas.dev/job", "marlaas.dev/job-uid"
DESIRED_HASH = "marlaas.dev/desired-hash"
SECRET_HASH = "marlaas.dev/secret-hash"
"""On the workload that mounts a Secret: what the Secret held when it was last applied. Secrets themselves are never read."""

ROLES = ("rollout", "trainer")
_LABEL = 63
_STATEFUL_SET = 52
"""A StatefulSet's pods carry `<name>-<10 characters>` as a label, which takes no more than 63."""


def sandbox_name(job: str) -> str:
    """Name of everything that a job owns in its namespace. By its ending a job is kept from naming another's Secret as its own
    (`marlaas_api.kinds.environment.SecretRef`)."""
    return f"{_fitted(job, _LABEL - len(RESERVED_ENDING))}{RESERVED_ENDING}"


def workers_name(pool: str, role: str) -> str:
    """Name of what a pool owns for one role, in the release's namespace. A Service's begins with a letter; a pool's need not."""
    if pool[0].isdigit():
        return _cut(f"p-{pool}-{role}", _STATEFUL_SET)
    return _fitted(f"{pool}-{role}", _STATEFUL_SET)


def accounts_name(pool: str) -> str:
    """Name of the pool's ServiceAccount."""
    return _fitted(f"{pool}-workers", _LABEL)


def document_name(pool: str) -> str:
    """Name of the ConfigMap with the pool's document."""
    return _fitted(f"{pool}-pool", _LABEL)


def labels(release: str, component: str, owner: Mapping[str, str]) -> dict[str, str]:
    """Labels of an owned object and of its pods; owner: POOL, or JOB and JOB_UID."""
    return {NAME: "marlaas", COMPONENT: component, INSTANCE: release, MANAGED_BY: MANAGER, **owner}


def owner_reference(kind: str, meta: Meta) -> dict[str, Any]:
    """Owner of an owned object: when the owner is gone, Kubernetes collects the object also without the operator."""
    return {"apiVersion": API_VERSION, "kind": kind, "name": meta.name, "uid": meta.uid, "controller": True}


def digest(value: object) -> str:
    """Short hash of a JSON value, independent of the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def stamped(manifest: Manifest) -> Manifest:
    """The manifest with its own hash as annotation, so that a change of what we want is seen however the server spells it."""
    meta = manifest["metadata"]
    annotations = {**meta.get("annotations", {}), DESIRED_HASH: digest(manifest)}
    return {**manifest, "metadata": {**meta, "annotations": annotations}}


def _fitted(name: str, longest: int) -> str:
    return name if len(name) <= longest else _cut(name, longest)


def _cut(name: str, longest: int) -> str:
    """As much of the name as there is room for, and 8 hex digits of its hash."""
    return f"{name[: longest - 9].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
