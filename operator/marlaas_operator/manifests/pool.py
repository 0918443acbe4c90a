"""Objects of a pool in the release's namespace: the ConfigMap with its document, and workers per role.

They are in the order of creation: the ServiceAccount first, and a StatefulSet after everything that its pods
mount and that protects them.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass

from marlaas_api.kinds import ModelPool, WorkersSpec
from marlaas_operator.installation import Installation
from marlaas_operator.manifests import names, network, pods
from marlaas_operator.manifests.pods import Part
from marlaas_operator.manifests.pool_document import pool_document
from marlaas_operator.manifests.pool_pod import DOCUMENT, worker_pod
from marlaas_operator.plan import Manifest
from marlaas_operator.snapshot import Meta

DOCUMENT_HASH = "marlaas.dev/document-hash"
"""Hash of the document, on pods; a change restarts them, one by one."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Input of a pool's objects. credentials: text of the bus credential, by role."""

    meta: Meta
    pool: ModelPool
    credentials: Mapping[str, str]

    def workers(self, role: str) -> WorkersSpec:
        """Return the spec of one role."""
        return self.pool.spec.rollout if role == "rollout" else self.pool.spec.trainer


def shared_objects(pool: Pool, installation: Installation) -> tuple[Manifest, ...]:
    """Return the ServiceAccount and the ConfigMap, which both roles use."""
    account = _object(pool, installation, ("v1", "ServiceAccount"), "") | {"automountServiceAccountToken": False}
    document = _object(pool, installation, ("v1", "ConfigMap"), "") | {"data": {DOCUMENT: _document(pool)}}
    account["metadata"]["name"] = names.accounts_name(pool.meta.name)
    document["metadata"]["name"] = names.document_name(pool.meta.name)
    return names.stamped(account), names.stamped(document)


def role_secret(pool: Pool, installation: Installation, role: str) -> Manifest:
    """Return the Secret with the role's bus credential; apply it before the StatefulSet."""
    secret = _object(pool, installation, ("v1", "Secret"), role)
    return {**secret, "type": "Opaque", "data": _secret_data(pool, role)}


def role_objects(pool: Pool, installation: Installation, role: str) -> tuple[Manifest, ...]:
    """Return NetworkPolicy, headless Service, PodDisruptionBudget and StatefulSet of one role."""
    policy = _object(pool, installation, ("networking.k8s.io/v1", "NetworkPolicy"), role)
    egress = [*network.to_platform(installation), network.to_https()]
    readers = network.from_metrics_readers(installation, pods.HEALTH_PORT)
    policy["spec"] = network.isolation(_selector(pool, role), egress, readers)
    budget = _object(pool, installation, ("policy/v1", "PodDisruptionBudget"), role)
    budget["spec"] = {"maxUnavailable": 1, "selector": {"matchLabels": _selector(pool, role)}}
    manifests = (policy, _service(pool, installation, role), budget, _stateful_set(pool, installation, role))
    return tuple(names.stamped(manifest) for manifest in manifests)


def _service(pool: Pool, installation: Installation, role: str) -> Part:
    service = _object(pool, installation, ("v1", "Service"), role)
    port = {"name": "health", "port": pods.HEALTH_PORT, "protocol": "TCP", "targetPort": "health"}
    service["spec"] = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": _selector(pool, role),
        "ports": [port],
    }
    return service


def _stateful_set(pool: Pool, installation: Installation, role: str) -> Part:
    """Build the StatefulSet: pod names are stable, because leases and the owners of episodes refer to them.

    It is Parallel, because replicas do not wait for each other, and so that a broken revision does not block
    the next one.
    """
    manifest = _object(pool, installation, ("apps/v1", "StatefulSet"), role)
    manifest["metadata"]["annotations"] = {names.SECRET_HASH: names.digest(_secret_data(pool, role))}
    manifest["spec"] = {
        "replicas": pool.workers(role).replicas,
        "serviceName": names.workers_name(pool.meta.name, role),
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "RollingUpdate"},
        "revisionHistoryLimit": 1,
        "selector": {"matchLabels": _selector(pool, role)},
        "template": {
            "metadata": {
                "labels": manifest["metadata"]["labels"],
                "annotations": {DOCUMENT_HASH: names.digest(_document(pool))},
            },
            "spec": worker_pod(pool.pool, installation, role),
        },
    }
    return manifest


def _object(pool: Pool, installation: Installation, kind: tuple[str, str], role: str) -> Part:
    """Build an object without content. kind: (apiVersion, kind); role: empty for objects that both roles share."""
    return {
        "apiVersion": kind[0],
        "kind": kind[1],
        "metadata": {
            "name": names.workers_name(pool.meta.name, role),
            "namespace": installation.namespace,
            "labels": names.labels(installation.release, role or "pool", {names.POOL: pool.meta.name}),
            "ownerReferences": [names.owner_reference("ModelPool", pool.meta)],
        },
    }


def _selector(pool: Pool, role: str) -> dict[str, str]:
    return {names.COMPONENT: role, names.POOL: pool.meta.name}


def _secret_data(pool: Pool, role: str) -> dict[str, str]:
    return {pods.CREDENTIAL: base64.b64encode(pool.credentials[role].encode()).decode()}


def _document(pool: Pool) -> str:
    return pool_document(pool.pool).model_dump_json()
