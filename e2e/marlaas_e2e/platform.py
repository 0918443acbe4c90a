"""The chart installed on a cluster, and what scenario tests ask of it as its users would."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from marlaas.models import prepare
from marlaas_api.nats_server import find_binary
from marlaas_e2e.api import Object
from marlaas_e2e.elsewhere import HERE, Elsewhere
from marlaas_e2e.handle import ClusterHandle, read_only_folder
from marlaas_e2e.images import RECIPES, Recipe, base_archive, build
from marlaas_e2e.kubectl import CommandFailed, run

ROOT = Path(__file__).resolve().parents[2]
RELEASE, NAMESPACE = "marlaas", "marlaas-system"
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

T = TypeVar("T")


@dataclass
class Platform:
    """The installed release. stages: what took how long, for the notes (seconds)."""

    cluster: ClusterHandle
    stages: dict[str, float] = field(default_factory=dict)

    def kubectl(self, *words: str | Path, stdin: str | None = None) -> str:
        """Standard output; raises CommandFailed."""
        return self.cluster.kubectl(*words, stdin=stdin)

    def apply(self, *bodies: Object) -> None:
        """As `kubectl apply -f`."""
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

    def status(self, kind: str, name: str, namespace: str = "") -> Object:
        """The object's status, empty until there is one."""
        status: Object = self.get(kind, name, namespace).get("status") or {}
        return status

    def condition(self, kind: str, name: str, wanted: str, namespace: str = "") -> Object:
        """One condition; empty until it is there."""
        conditions: list[Object] = self.status(kind, name, namespace).get("conditions") or []
        return next((each for each in conditions if each["type"] == wanted), {})

    def marlaas(self, *words: str | Path) -> str:
        """What `kubectl marlaas` says; raises CommandFailed."""
        place: list[str | Path] = ["--kubeconfig", self.cluster.kubeconfig, "--context", self.cluster.context]
        return run([sys.executable, "-m", "marlaas", *words, *place])

    def why(self, job: str, namespace: str) -> str:
        """What `kubectl marlaas why` says."""
        return self.marlaas("why", job, "-n", namespace)

    def tenant(self, namespace: str) -> None:
        """Make a tenant's namespace at the restricted level, with the Python environment if images are thin."""
        labels = {"name": namespace, "labels": RESTRICTED}
        body: Object = {"apiVersion": "v1", "kind": "Namespace", "metadata": labels}
        self.apply(body)
        if Elsewhere.said().worker is None:
            self.apply(*read_only_folder(namespace, "python-environment", ROOT))

    def ended(self, job: str, namespace: str, timeout_s: float = 900) -> Object:
        """Wait for a final phase; return the status."""
        return self.until(lambda: _final(self.status("rljob", job, namespace)), f"{namespace}/{job} ends", timeout_s)

    def tiny_pool(self) -> None:
        """Wait for the quickstart's pool; make it if no scenario before did, so that each file can be run alone."""
        if not self.get("modelpool", "tiny"):
            documents = yaml.safe_load_all((ROOT / "examples" / "quickstart.yaml").read_text())
            self.apply(*(each for each in documents if each["kind"] == "ModelPool"))
        self.pool_ready("tiny")

    def pool_ready(self, pool: str, timeout_s: float = 900) -> None:
        """Wait until engines and trainers of a pool serve."""
        ready = lambda: self.condition("modelpool", pool, "Ready").get("status") == "True"  # noqa: E731
        self.until(ready, f"pool {pool} is ready", timeout_s)

    def until(self, look: Callable[[], T], what: str, timeout_s: float = 120) -> T:
        """The first thing that `look` finds; fails with everything that helps to see why it found nothing."""
        deadline = time.monotonic() + timeout_s
        while not (found := look()):
            if time.monotonic() > deadline:
                pytest.fail(f"not within {timeout_s:.0f} s: {what}\n{self.picture()}")
            time.sleep(_POLL_S)
        return found

    def picture(self) -> str:
        """The cluster at a glance."""
        return "\n\n".join(self._answer(question) for question in _QUESTIONS)

    def install(self, *more: str) -> None:
        """`helm install`, or an upgrade where it is installed."""
        values = ROOT / "e2e" / "values.yaml"
        words = ("upgrade", "--install", RELEASE, ROOT / "charts" / "marlaas", "--namespace", NAMESPACE)
        try:
            self.cluster.helm(
                *words, "--values", values, *Elsewhere.said().chart_words(), "--wait", "--timeout", "4m", *more
            )
        except CommandFailed as error:
            pytest.fail(f"{error}\n{self.picture()}")

    def _answer(self, question: tuple[str, ...]) -> str:
        try:
            return f"$ kubectl {' '.join(question)}\n{self.kubectl(*question)[-6000:]}"
        except CommandFailed as error:
            return f"$ kubectl {' '.join(question)}\n{error}"


def platform_images() -> list[Path]:
    """Archives of the operator, the bus, the thin image of the workers, and a tenant's own environment."""
    arguments = {"PIP_CERT": _CERTIFICATES}
    named = Elsewhere.said().image
    operator = Recipe(named("operator"), ROOT / "images" / "operator.Dockerfile", ROOT, arguments)
    nats = Recipe(named("nats"), RECIPES / "nats" / "Dockerfile", find_binary().resolve().parent)
    environment = Recipe(named("environment"), RECIPES / "environment" / "Dockerfile", ROOT, arguments)
    return [base_archive(), build(operator), build(nats), build(environment)]


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


def _final(status: Object) -> Object:
    return status if status.get("phase") in ("Succeeded", "Failed") else {}


def manifest(name: str) -> list[dict[str, Any]]:
    """The documents of `e2e/manifests/NAME.yaml`, with images by the names that they have on this cluster."""
    text = (ROOT / "e2e" / "manifests" / f"{name}.yaml").read_text()
    return list(yaml.safe_load_all(text.replace(f"image: {HERE}/", f"image: {Elsewhere.said().images}/")))
