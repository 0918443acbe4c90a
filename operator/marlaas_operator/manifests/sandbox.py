"""Objects of an admitted job in its own namespace: the sandbox and what isolates it.

They are in the order of creation: each workload comes after everything that protects it. The ServiceAccount is
created first and deleted last, so its existence shows that other objects may exist.
"""

import base64

from marlaas_operator.installation import Installation
from marlaas_operator.manifests import names, network, pods
from marlaas_operator.manifests.pods import Part
from marlaas_operator.manifests.sandbox_pod import JOB_FILE, Sandbox, sandbox_pod
from marlaas_operator.plan import Manifest

COMPONENT = "sandbox"


def sandbox_secret(sandbox: Sandbox, installation: Installation) -> Manifest:
    """Return the Secret with the bus credential and the job's document; apply it before the Deployment.

    Only the supervisor's container mounts it.
    """
    return {**_object(sandbox, installation, "v1", "Secret"), "type": "Opaque", "data": _secret_data(sandbox)}


def sandbox_objects(sandbox: Sandbox, installation: Installation) -> tuple[Manifest, ...]:
    """Return ServiceAccount, NetworkPolicy and Deployment, in the order of creation."""
    account = {**_object(sandbox, installation, "v1", "ServiceAccount"), "automountServiceAccountToken": False}
    manifests = (account, _policy(sandbox, installation), _deployment(sandbox, installation))
    return tuple(names.stamped(manifest) for manifest in manifests)


def _policy(sandbox: Sandbox, installation: Installation) -> Part:
    allowed = [*network.to_platform(installation), *network.to_destinations(sandbox.environment.egress)]
    policy = _object(sandbox, installation, "networking.k8s.io/v1", "NetworkPolicy")
    return {**policy, "spec": network.isolation(_selector(sandbox), allowed)}


def _deployment(sandbox: Sandbox, installation: Installation) -> Part:
    manifest = _object(sandbox, installation, "apps/v1", "Deployment")
    manifest["metadata"]["annotations"] = {names.SECRET_HASH: names.digest(_secret_data(sandbox))}
    manifest["spec"] = {
        "replicas": sandbox.environment.replicas,
        "selector": {"matchLabels": _selector(sandbox)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "revisionHistoryLimit": 1,
        "template": {
            "metadata": {"labels": manifest["metadata"]["labels"]},
            "spec": sandbox_pod(sandbox, installation),
        },
    }
    return manifest


def _object(sandbox: Sandbox, installation: Installation, api_version: str, kind: str) -> Part:
    owner = {
        names.POOL: sandbox.document.pool,
        names.JOB: sandbox.meta.name,
        names.JOB_UID: sandbox.meta.uid,
    }
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": sandbox.name,
            "namespace": sandbox.meta.namespace,
            "labels": names.labels(installation.release, COMPONENT, owner),
            "ownerReferences": [names.owner_reference("RLJob", sandbox.meta)],
        },
    }


def _selector(sandbox: Sandbox) -> dict[str, str]:
    return {names.COMPONENT: COMPONENT, names.JOB_UID: sandbox.meta.uid}


def _secret_data(sandbox: Sandbox) -> dict[str, str]:
    data = {pods.CREDENTIAL: sandbox.credential, JOB_FILE: sandbox.document.model_dump_json()}
    return {key: base64.b64encode(text.encode()).decode() for key, text in data.items()}
