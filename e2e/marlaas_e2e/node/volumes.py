"""Volumes for claims of the class `folder`: a folder of the node each, as `local` volumes (so that fsGroup applies)."""

from collections.abc import Sequence
from pathlib import Path

from marlaas_e2e.api import Object
from marlaas_e2e.node.layout import NODE

CLASS = "folder"
PROVISIONER = "e2e.local/folder"


def missing_volumes(claims: Sequence[Object], volumes: Sequence[Object], folder: Path) -> list[Object]:
    """A PersistentVolume for every pending claim of our class that has none yet."""
    present = {volume["metadata"]["name"] for volume in volumes}
    wanted = [_volume(claim, folder) for claim in claims if _waits(claim)]
    return [volume for volume in wanted if volume["metadata"]["name"] not in present]


def released_volumes(volumes: Sequence[Object]) -> list[Object]:
    return [volume for volume in volumes if _ours(volume) and volume.get("status", {}).get("phase") == "Released"]


def folder_of(volume: Object) -> Path:
    return Path(volume["spec"]["local"]["path"])


def _waits(claim: Object) -> bool:
    phase = claim.get("status", {}).get("phase")
    return bool(
        claim["spec"].get("storageClassName") == CLASS and phase == "Pending" and not claim["spec"].get("volumeName")
    )


def _ours(volume: Object) -> bool:
    annotations = volume["metadata"].get("annotations") or {}
    return bool(annotations.get("pv.kubernetes.io/provisioned-by") == PROVISIONER)


def _volume(claim: Object, folder: Path) -> Object:
    metadata = claim["metadata"]
    name = f"folder-{metadata['uid']}"
    host = {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}
    reference = {key: metadata[key] for key in ("namespace", "name", "uid")}
    reference |= {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name, "annotations": {"pv.kubernetes.io/provisioned-by": PROVISIONER}},
        "spec": {
            "storageClassName": CLASS,
            "capacity": {"storage": claim["spec"]["resources"]["requests"]["storage"]},
            "accessModes": claim["spec"]["accessModes"],
            "persistentVolumeReclaimPolicy": "Delete",
            "claimRef": reference,
            "local": {"path": str(folder / name)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [host]}]}},
        },
    }
