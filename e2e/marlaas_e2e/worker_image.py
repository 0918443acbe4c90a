"""The whole worker image, once: `make e2e-images`. The scenarios use a thin image and mount the environment instead.

python -m marlaas_e2e.worker_image build                              in the machine's network, which reaches a package index
python -m marlaas_e2e run python -m marlaas_e2e.worker_image start    a pod from it, in the cluster
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from marlaas_e2e.cache import cache_dir
from marlaas_e2e.handle import ClusterHandle
from marlaas_e2e.images import Recipe, build, image_id
from marlaas_e2e.kubectl import CommandFailed
from marlaas_e2e.node.layout import Layout

ROOT = Path(__file__).resolve().parents[2]
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
_NAME = "worker-image"
ROOM_GB = 42.0
"""Measured: layers under way and done, the archive, and what the node unpacks. About 14 stay, for the next build."""
_MANIFEST = Path(__file__).with_suffix(".yaml")


class NoRoom(Exception):
    """The disk is too small; the message says what to do."""


def recipe() -> Recipe:
    """The worker's image on the base of the tests, from locks/cpu.txt."""
    arguments = {"ACCEL": "cpu", "PIP_CERT": _CERTIFICATES, "SSL_CERT_FILE": _CERTIFICATES}
    return Recipe("e2e.local/worker:1", ROOT / "images" / "worker.Dockerfile", ROOT, arguments)


def start(cluster: ClusterHandle) -> str:
    """Run the pod to its end; its words. Raises CommandFailed."""
    succeeded = ("--for=jsonpath={.status.phase}=Succeeded", "--timeout=300s")
    try:
        cluster.kubectl("apply", "-f", _MANIFEST)
        cluster.kubectl("wait", f"pod/{_NAME}", "-n", _NAME, *succeeded)
        return cluster.kubectl("logs", _NAME, "-n", _NAME)
    finally:
        cluster.kubectl("delete", "namespace", _NAME, "--wait=true")


def main(arguments: Sequence[str] | None = None) -> int:
    """Say what it took; 1 with one sentence otherwise."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return {"build": _build, "start": _start}[" ".join(words)]()
    except KeyError:
        print(__doc__, file=sys.stderr)
    except (CommandFailed, NoRoom) as error:
        print(error, file=sys.stderr)
    return 1


def require_room(folder: Path, wanted_gb: float) -> None:
    """Make the folder. Raises NoRoom when the disk that holds the folder has fewer free; full, it would end other people's work too."""
    folder.mkdir(parents=True, exist_ok=True)
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < wanted_gb:
        raise NoRoom(
            f"building the worker image and starting a pod from it takes {wanted_gb:.0f} GB of disk at its height, and {folder} has "
            f"{free_gb:.0f} GB free: make room, or set MARLAAS_CACHE to a folder on a larger disk"
        )


def _build() -> int:
    require_room(cache_dir(), ROOM_GB)
    begun = time.monotonic()
    archive = build(recipe())
    size_gb, took_s = archive.stat().st_size / 1e9, time.monotonic() - begun
    print(json.dumps({"image": image_id(archive), "size_gb": round(size_gb, 2), "built_or_found_s": round(took_s)}))
    return 0


def _start() -> int:
    layout = Layout(Path(os.environ["MARLAAS_E2E_ROOT"]))
    cluster = ClusterHandle(layout.kubeconfig, "e2e", layout)
    archive = build(recipe())
    begun = time.monotonic()
    try:
        cluster.import_image(archive)
        imported = time.monotonic()
        words = start(cluster)
        ended = time.monotonic()
    finally:  # twice seven gigabytes; the layers are kept, for the next build
        archive.unlink()
        cluster.drop_image(recipe().tag)
    said = {"import_s": round(imported - begun), "pod_s": round(ended - imported), "pod_said": words.strip()}
    print(json.dumps(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
