"""The chart installed on a cluster, and what scenario tests ask of it as its users would."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import pytest
import yaml

from marlaas.models import prepare
from marlaas_api.nats_server import find_binary
from marlaas_e2e.api import Object
from marlaas_e2e.elsewhere import HERE, Elsewhere
from marlaas_e2e.handle import ClusterHandle
from marlaas_e2e.images import RECIPES, Recipe, archive_of, base_archive, build
from marlaas_e2e.kubectl import CommandFailed, run

ROOT = Path(__file__).resolve().parents[2]
RELEASE, NAMESPACE = "marlaas", "marlaas-system"
MANAGED = "app.kubernetes.io/managed-by=marlaas-operator"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
_WORKER_UID = 10001
_POLL_S = 0.5
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
_QUESTIONS = (
    ("get", "modelpools,rljobs,pods", "-A", "-o", "wide"),
    ("get", "rljobs,modelpools", "-A", "-o", "jsonpath={range .items[*]}{.metadata.name}: {.status.message}{'\\n'}{end}"),
    ("get", "events", "-A", "--sort-by=.metadata.creationTimestamp"),
    ("logs", "-n", NAMESPACE, f"deployment/{RELEASE}-operator", "--tail=40"),
    ("logs", "-n", NAMESPACE, f"deployment/{RELEASE}-orchestrator", "--tail=30"),
)  # fmt: skip

_PROBE = yaml.safe_load(Path(__file__).with_name("programs.yaml").read_text())["probe"]

T = TypeVar("T")
Places = Mapping[str, tuple[str, int]]
"""Addresses and ports by name."""


@dataclass
class Platform:
    """The installed release. stages: what took how long, for the notes (seconds)."""

    cluster: ClusterHandle
    stages: dict[str, float] = field(default_factory=dict)

    def kubectl(self, *words: str | Path, stdin: str | None = None) -> str:
        return self.cluster.kubectl(*words, stdin=stdin)

    def apply(self, *bodies: Object) -> None:
        self.kubectl("apply", "-f", "-", stdin="\n---\n".join(json.dumps(body) for body in bodies))

    def get(self, kind: str, name: str, namespace: str = "") -> Object:
        """The object; empty when there is none."""
        place = ["-n", namespace] if namespace else []
        text = self.kubectl("get", kind, name, *place, "--ignore-not-found", "-o", "json")
        body: Object = json.loads(text) if text.strip() else {}
        return body

    def names(self, kinds: str, namespace: str, selector: str = "") -> list[str]:
        """`kind/name` of what is there."""
        chosen = ["-l", selector] if selector else []
        return self.kubectl("get", kinds, "-n", namespace, *chosen, "-o", "name").split()

    def owned(self, namespace: str, selector: str = MANAGED) -> list[str]:
        return self.names("deployments,networkpolicies,secrets,serviceaccounts,pods", namespace, selector)

    def status(self, kind: str, name: str, namespace: str = "") -> Object:
        """The object's status, empty until there is one."""
        status: Object = self.get(kind, name, namespace).get("status") or {}
        return status

    def condition(self, kind: str, name: str, wanted: str, namespace: str = "") -> Object:
        """One condition; empty until it is there."""
        conditions: list[Object] = self.status(kind, name, namespace).get("conditions") or []
        return next((each for each in conditions if each["type"] == wanted), {})

    def step(self, job: str, namespace: str) -> int:
        return int(self.status("rljob", job, namespace).get("step") or 0)

    def steps_on(self, job: str, namespace: str, why: str, timeout_s: float = 600) -> None:
        """Wait for two more steps: one more may have been made before and not be in the status yet."""
        before = self.step(job, namespace)
        self.until(lambda: self.step(job, namespace) > before + 1, f"steps of {namespace}/{job} {why}", timeout_s)

    def patch(self, kind: str, name: str, spec: Object, namespace: str = "") -> None:
        place = ["-n", namespace] if namespace else []
        self.kubectl("patch", kind, name, *place, "--type=merge", "--patch", json.dumps({"spec": spec}))

    def python(self, pod: str, container: str, program: str, *words: str, namespace: str = "", stdin: str = "") -> str:
        """What a program prints in a container; namespace: the release's by default."""
        place = ("exec", "-i", "-n", namespace or NAMESPACE, pod, "-c", container, "--")
        return self.kubectl(*place, "python3", "-c", program, *words, stdin=stdin)

    def opened(self, places: Places, pod: str, container: str, namespace: str) -> set[str]:
        """Names of the places that a program in a container can connect to."""
        return set(json.loads(self.python(pod, container, _PROBE, json.dumps(places), namespace=namespace)))

    def api_server(self) -> tuple[str, int]:
        """The API server's own address; its Service has another."""
        chosen = ("-n", "default", "-l", "kubernetes.io/service-name=kubernetes")
        (behind, *_) = self.cluster.get("endpointslices", *chosen)["items"]
        return str(behind["endpoints"][0]["addresses"][0]), int(behind["ports"][0]["port"])

    def marlaas(self, *words: str | Path) -> str:
        place: list[str | Path] = ["--kubeconfig", self.cluster.kubeconfig, "--context", self.cluster.context]
        return run([sys.executable, "-m", "marlaas", *words, *place])

    def why(self, job: str, namespace: str) -> str:
        return self.marlaas("why", job, "-n", namespace)

    def ended(self, job: str, namespace: str, timeout_s: float = 900) -> Object:
        """Wait for a final phase; return the status."""
        return self.until(lambda: _final(self.status("rljob", job, namespace)), f"{namespace}/{job} ends", timeout_s)

    def pool_ready(self, pool: str, timeout_s: float = 900) -> None:
        """Wait until engines and trainers of a pool serve."""
        ready = lambda: self.condition("modelpool", pool, "Ready").get("status") == "True"  # noqa: E731
        self.until(ready, f"pool {pool} is ready", timeout_s)

    def ready_pod(self, namespace: str, selector: str) -> Object:
        """Wait for a pod whose containers are all ready."""

        def ready() -> list[Object]:
            return [pod for pod in self.cluster.get("pods", "-n", namespace, "-l", selector)["items"] if _is_ready(pod)]

        return self.until(ready, f"a pod of {namespace} with {selector} is ready", 300)[0]

    def until(self, look: Callable[[], T], what: str, timeout_s: float = 120) -> T:
        """The first thing that `look` finds; fails with everything that helps to see why it found nothing."""
        deadline = (began := time.monotonic()) + timeout_s
        while not (found := look()):
            if (looked := time.monotonic()) > deadline:
                pytest.fail(f"not within {timeout_s:.0f} s: {what}\n{self.picture()}")
            time.sleep(max(_POLL_S, looked - began))  # on a busy machine the looks take half of the time at most
            began = time.monotonic()
        return found

    def picture(self) -> str:
        return "\n\n".join(self._answer(question) for question in _QUESTIONS)

    def install(self, *more: str) -> None:
        """`helm install`, or an upgrade where it is installed."""
        values = ROOT / "e2e" / "values.yaml"
        words = ("upgrade", "--install", RELEASE, ROOT / "charts" / "marlaas", "--namespace", NAMESPACE)
        try:
            said = Elsewhere.said().chart_words()
            self.cluster.helm(*words, "--values", values, *said, "--wait", "--timeout", "4m", *more)
        except CommandFailed as error:
            pytest.fail(f"{error}\n{self.picture()}")

    def _answer(self, question: tuple[str, ...]) -> str:
        try:
            return f"$ kubectl {' '.join(question)}\n{self.kubectl(*question)[-6000:]}"
        except CommandFailed as error:
            return f"$ kubectl {' '.join(question)}\n{error}"


def platform_recipes() -> list[Recipe]:
    arguments = {"PIP_CERT": _CERTIFICATES}
    named = Elsewhere.said().image
    return [
        Recipe(named("operator"), ROOT / "images" / "operator.Dockerfile", ROOT, arguments),
        Recipe(named("nats"), RECIPES / "nats" / "Dockerfile", find_binary().resolve().parent),
        Recipe(named("environment"), RECIPES / "environment" / "Dockerfile", ROOT, arguments),
    ]


def build_platform() -> None:
    """Build the images of the scenarios, outside the cluster: inside is no way to the package index."""
    base_archive()
    for recipe in platform_recipes():
        build(recipe)


def platform_archives() -> list[Path]:
    """Archives that `build_platform` made, and the thin image of the workers."""
    return [base_archive(), *map(archive_of, platform_recipes())]


def model_cache() -> list[Object]:
    """A volume and a claim with the tiny model in it, as a platform team would fill it once; nothing where workers have no folder of this machine."""
    if Elsewhere.said().worker is not None:
        return []
    made = prepare("tiny")
    folder = made.parent.parent / "e2e-model-cache"
    target = folder / "models" / made.name
    if not target.exists():
        shutil.copytree(made, target)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, _WORKER_UID, _WORKER_UID)
    volume, claim = read_only_folder(NAMESPACE, "model-cache", folder)
    for body in (volume, claim):
        body["spec"]["accessModes"] = ["ReadWriteMany"]
    return [volume, claim]


def read_only_folder(namespace: str, name: str, folder: Path) -> list[dict[str, Any]]:
    """A volume and a claim for a folder of this machine. Raises PermissionError if pods, of another uid, could not read it."""
    if folder.stat().st_mode & 0o005 != 0o005:
        raise PermissionError(f"Pods cannot read {folder}: chmod o+rx it")
    return manifest("read-only-folder", NAMESPACE=namespace, NAME=name, FOLDER=str(folder))


def tenant(namespace: str) -> list[Object]:
    """A tenant's namespace at the restricted level, with the Python environment if images are thin."""
    labels = {"name": namespace, "labels": RESTRICTED}
    body: Object = {"apiVersion": "v1", "kind": "Namespace", "metadata": labels}
    return [body, *([] if Elsewhere.said().worker else read_only_folder(namespace, "python-environment", ROOT))]


def plain_pool() -> list[Object]:
    """The pool of most scenarios, and the objects that it names."""
    objects = manifest("plain-pool", MODEL=f"/models/{prepare('tiny').name}")
    if Elsewhere.said().worker:  # no folder of this machine, so no volume with the model
        objects[-1]["spec"]["model"] = {"builtin": "tiny"}
    return [*objects]


def endless(name: str, namespace: str, *, training: Object = MappingProxyType({}), **spec: object) -> Object:
    """A job that runs until it is deleted; `training` and `spec` are merged into it."""
    (body,) = manifest("endless")
    body["metadata"] = {"name": name, "namespace": namespace}
    body["spec"] |= spec
    body["spec"]["training"] |= training
    return body


def _is_ready(pod: Object) -> bool:
    statuses = pod["status"].get("containerStatuses", [])
    there = len(statuses) == len(pod["spec"]["containers"]) and "deletionTimestamp" not in pod["metadata"]
    return there and all(status["ready"] for status in statuses)


def _final(status: Object) -> Object:
    return status if status.get("phase") in ("Succeeded", "Failed") else {}


def manifest(name: str, **words: str) -> list[dict[str, Any]]:
    """The documents of `e2e/manifests/NAME.yaml`, with images by the names that they have on this cluster, and words replaced."""
    text = (ROOT / "e2e" / "manifests" / f"{name}.yaml").read_text()
    for word, replacement in words.items():
        text = text.replace(word, replacement)
    return list(yaml.safe_load_all(text.replace(f"image: {HERE}/", f"image: {Elsewhere.said().images}/")))
