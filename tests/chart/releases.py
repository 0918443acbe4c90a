"""The chart, installed, and objects to try on it."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.operator.objects import body
from tests.tables import data

from marlaas_e2e.control_plane import ControlPlane
from marlaas_e2e.kubectl import CommandFailed

from .conftest import Document, Helm

NAMESPACE = "marlaas-system"
OPERATOR = f"system:serviceaccount:{NAMESPACE}:marlaas-operator"
OURS = {"app.kubernetes.io/managed-by": "marlaas-operator"}
IN_FORCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Release:
    """The chart, installed under its defaults."""

    plane: ControlPlane
    helm: Helm

    def kubectl_as(self, user: str, *arguments: str, stdin: str | None = None) -> str:
        groups = ["system:authenticated", "system:serviceaccounts"]
        return self.plane.kubectl(*arguments, stdin=stdin, kubeconfig=self.plane.user_kubeconfig(user, groups))

    def refusal(self, user: str, *arguments: str, stdin: str | None = None) -> str:
        """The API server's sentence; empty when it did what was asked."""
        try:
            self.kubectl_as(user, *arguments, stdin=stdin)
        except CommandFailed as error:
            return str(error)
        return ""

    def call(self, *arguments: str | Path) -> str:
        done = self.helm("--kubeconfig", self.plane.kubeconfig, "--namespace", NAMESPACE, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


def wait_until(look: Callable[[], object], what: str = "") -> None:
    """Wait until something is true that an API server or its controllers do a moment later."""
    until = time.monotonic() + IN_FORCE_S
    while not look():
        assert time.monotonic() < until, f"not after {IN_FORCE_S:.0f} s: {what}"


def wait_for_admission(release: Release) -> None:
    """A new binding comes into force within seconds, not at once."""
    words = ("create", "--dry-run=server", "-f", "-")
    for policy_name in ("own-objects", "locked-pods"):
        probe = secret("probe", {}) if policy_name == "own-objects" else deployment(automountServiceAccountToken=True)
        tried = lambda made=probe: release.refusal(OPERATOR, *words, stdin=json.dumps(made))  # noqa: E731
        wait_until(lambda policy=policy_name, tried=tried: policy in tried(), f"{policy_name} is in force")


def secret(name: str, labels: dict[str, str], namespace: str = "team-a") -> Document:
    return body("v1", "Secret", namespace, name, labels=labels) | {"stringData": {"bus.creds": "x"}}


def deployment(**pod: object) -> Document:
    """A sandbox of the operator's that admission lets through; pod: what of its spec is otherwise."""
    made: Document = data(__file__, "deployment")
    made["spec"]["template"]["spec"] |= pod
    return made


def put(release: Release, made: Document) -> str:
    return release.refusal(OPERATOR, "apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(made))
