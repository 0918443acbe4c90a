"""Objects of a job's exporter in the job's own namespace: a pod of the worker image that reports the job to trackers and webhooks, and uploads its adapters.

They are made as those of a sandbox. The pod gets the tenant's Secrets from the kubelet; the operator reads none. Its bus
credential allows to read the job's document, progress, records and published adapters, and to write its report (`marlaas_api.bus_users.permissions`).
"""

import base64
from dataclasses import dataclass, replace

from marlaas_api.kinds import SandboxBounds
from marlaas_api.messages import JobDocument
from marlaas_api.messages.job_spec import ExportSettings
from marlaas_operator.installation import Installation
from marlaas_operator.manifests import network, pods
from marlaas_operator.manifests.pods import Part, Placement, Volume
from marlaas_operator.plan import Manifest
from marlaas_operator.pod_facts import EXPORTER
from marlaas_operator.snapshot import Meta

JOB_FILE = "job.json"
WEBHOOK = "MARLAAS_WEBHOOK_"
"""Prefix of the variables with the URLs of `export.notify`, counted from 1 (`marlaas.notifications`)."""
_HUB, _TOKEN = "/etc/marlaas/hub", "token"
"""Folder and file with the hub's token, which the kubelet renews; HF_TOKEN_PATH names the file."""
_S3, _VOLUME = "/etc/marlaas/s3", "/volume"
"""Folders of the Secret with the bucket's variables, and of the claim; MARLAAS_S3_FOLDER and MARLAAS_EXPORT_VOLUME name them."""
_BLOBS = f"file://{pods.SCRATCH}/blobs"
"""Required by the worker's command line; an exporter stores no blobs."""
_GRACE_S = 20
_START_S = 120
_REQUESTS: Part = {"cpu": "20m", "memory": "192Mi"}
"""MLflow's client takes 150 MiB, that of W&B 100 MiB more in a process of its own."""
_OTHER_GI, _ADAPTER_GI = 4, 12
"""Limit of the scratch volume. Of the adapters to upload, one of each target lies there at a time; rank 256 on a model with 70 B parameters is 12 GiB."""


@dataclass(frozen=True, slots=True)
class Exporter:
    """Input of an exporter's objects.

    bounds: from the job's pool. credential: text of its bus credential. has_succeeded: whether the job has, so that its adapters are uploaded.
    """

    meta: Meta
    document: JobDocument
    bounds: SandboxBounds
    credential: str
    has_succeeded: bool = False

    @property
    def name(self) -> str:
        """Name of all objects of the exporter."""
        return pods.exporter_name(self.meta.name)

    @property
    def labels(self) -> dict[str, str]:
        """Labels that select its pod."""
        return {pods.COMPONENT: EXPORTER, pods.JOB_UID: self.meta.uid}


def exporter_secret(exporter: Exporter, installation: Installation) -> Manifest:
    """Return the Secret with the bus credential and the job's document; apply it before the Deployment."""
    return {**_object(exporter, installation, "v1", "Secret"), "type": "Opaque", "data": _secret_data(exporter)}


def exporter_objects(exporter: Exporter, installation: Installation) -> tuple[Manifest, ...]:
    """Return ServiceAccount, NetworkPolicy and Deployment, in the order of creation."""
    account = {**_object(exporter, installation, "v1", "ServiceAccount"), "automountServiceAccountToken": False}
    policy = _object(exporter, installation, "networking.k8s.io/v1", "NetworkPolicy")
    destinations = network.to_destinations(exporter.document.spec.export.egress, installation)
    policy["spec"] = network.isolation(exporter.labels, [*network.to_platform(installation), *destinations])
    return tuple(pods.stamped(manifest) for manifest in (account, policy, _deployment(exporter, installation)))


def _deployment(exporter: Exporter, installation: Installation) -> Part:
    manifest = _object(exporter, installation, "apps/v1", "Deployment")
    manifest["metadata"]["annotations"] = {pods.SECRET_HASH: pods.digest(_secret_data(exporter))}
    manifest["spec"] = {
        "replicas": 1,
        "selector": {"matchLabels": exporter.labels},
        "strategy": {"type": "Recreate"},  # two exporters of a job would send a row twice
        "revisionHistoryLimit": 1,
        "template": {"metadata": {"labels": manifest["metadata"]["labels"]}, "spec": _pod(exporter, installation)},
    }
    return manifest


def _object(exporter: Exporter, installation: Installation, api_version: str, kind: str) -> Part:
    meta = exporter.meta
    owner = {pods.POOL: exporter.document.pool, pods.JOB: meta.name, pods.JOB_UID: meta.uid}
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": exporter.name,
            "namespace": meta.namespace,
            "labels": pods.labels(installation.release, EXPORTER, owner),
            "ownerReferences": [pods.owner_reference("RLJob", meta)],
        },
    }


def _secret_data(exporter: Exporter) -> dict[str, str]:
    data = {pods.CREDENTIAL: exporter.credential, JOB_FILE: exporter.document.model_dump_json()}
    return {key: base64.b64encode(text.encode()).decode() for key, text in data.items()}


def _pod(exporter: Exporter, installation: Installation) -> Part:
    image, bounds = installation.worker_image, exporter.bounds
    export = exporter.document.spec.export
    num = len(export.remote_uploads)
    memory, scratch = ("2Gi", f"{_OTHER_GI + num * _ADAPTER_GI}Gi") if num else ("1Gi", "1Gi")
    mounted = _mounted(export, exporter.has_succeeded)
    env = pods.packages_env(installation) | {variable: path for variable, path, _ in mounted}
    volumes = (
        pods.empty("scratch", pods.SCRATCH, scratch),
        pods.empty("tmp", "/tmp", "256Mi"),
        pods.secret("bus", pods.BUS_FOLDER, exporter.name),
        *(volume for _, _, volume in mounted),
        *pods.packages_volumes(installation),
    )
    placement = Placement(
        node_selector=bounds.node_selector,
        tolerations=bounds.tolerations,
        runtime_class_name=bounds.runtime_class_name or installation.sandbox.runtime_class_name,
        pull_secrets=installation.worker_image.pull_secrets,
    )
    command = [
        *pods.worker_command("exporter", installation.nats_url, _BLOBS),
        *("--job-file", f"{pods.BUS_FOLDER}/{JOB_FILE}"),
    ]
    container = {
        **pods.container("exporter", image.name, command, volumes),
        **pods.health(_START_S),
        "imagePullPolicy": image.pull_policy,
        "env": [*pods.worker_env(env), *_webhooks(exporter)],
        "resources": {"requests": _REQUESTS, "limits": {"memory": memory}},
    }
    if export.secret_refs:
        container["envFrom"] = [{"secretRef": {"name": secret.name}} for secret in export.secret_refs]
    return {**pods.pod_spec(exporter.name, placement, volumes, _GRACE_S), "containers": [container]}


def _mounted(export: ExportSettings, has_succeeded: bool) -> list[tuple[str, str, Volume]]:
    """Return what uploads need: each a variable, the path that it names, and the volume there.

    The pod also runs without the Secrets; the exporter then reports that they are missing. Without the claim it does not start, or
    not while another node has it, so a pod that reports a running job does not have it.
    """
    found = []
    if export.hub is not None and (key := export.hub.token_secret_ref) is not None:
        token = _optional("hub", _HUB, key.name, items=[{"key": key.key, "path": _TOKEN}])
        found.append(("HF_TOKEN_PATH", f"{_HUB}/{_TOKEN}", token))
    if export.s3 is not None and (ref := export.s3.secret_ref) is not None:
        found.append(("MARLAAS_S3_FOLDER", _S3, _optional("s3", _S3, ref.name)))
    if export.volume is not None and has_succeeded:
        found.append(("MARLAAS_EXPORT_VOLUME", _VOLUME, pods.claim("volume", _VOLUME, export.volume.claim_name)))
    return found


def _optional(name: str, path: str, secret_name: str, **fields: object) -> Volume:
    mounted = pods.secret(name, path, secret_name)
    return replace(mounted, source={"secret": {**mounted.source["secret"], **fields, "optional": True}})


def _webhooks(exporter: Exporter) -> list[Part]:
    """Return the variables with the webhooks' URLs."""
    refs = [notify.webhook.secret_ref for notify in exporter.document.spec.export.notify]
    return [
        {"name": f"{WEBHOOK}{number}", "valueFrom": {"secretKeyRef": {"name": ref.name, "key": ref.key}}}
        for number, ref in enumerate(refs, 1)
    ]
