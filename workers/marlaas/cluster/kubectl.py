"""Client for a cluster that runs kubectl as a child process.

kubectl reads the kubeconfig, runs login plugins, and talks to the API server. This module passes flags and parses
JSON. It makes no decisions and depends on no MARLaaS kind.
"""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from marlaas.cluster.errors import CommandFailed, KubectlMissing, error_of

FIELD_MANAGER = "marlaas"
REQUEST_TIMEOUT_S = 30
_PROCESS_TIMEOUT_S = 120.0
"""Longer than the request's timeout, because a login plugin may prompt the user."""


@dataclass(frozen=True, slots=True)
class ClusterTarget:
    """Cluster and namespace to use. None leaves a value to the kubeconfig."""

    context: str | None = None
    namespace: str | None = None
    kubeconfig: str | None = None

    def flags(self) -> tuple[str, ...]:
        """Return the equivalent kubectl flags."""
        given = (("context", self.context), ("namespace", self.namespace), ("kubeconfig", self.kubeconfig))
        return tuple(f"--{name}={value}" for name, value in given if value is not None)


@dataclass(frozen=True, slots=True)
class Kubectl:
    """Runs kubectl for one target. `program` is looked up on PATH. Every method raises the errors of `marlaas.cluster.errors`."""

    target: ClusterTarget = ClusterTarget()
    program: str = "kubectl"

    def get(self, resource: str, name: str) -> dict[str, Any]:
        """Return one object. Raises ObjectMissing."""
        return self._json("get", resource, name)

    def list(self, resource: str, *options: str) -> list[dict[str, Any]]:
        """Return the objects of the namespace. `options` takes flags such as `--all-namespaces` and selectors."""
        items: list[dict[str, Any]] = self._json("get", resource, *options)["items"]
        return items

    def apply(self, body: dict[str, Any], *, dry_run: bool) -> dict[str, Any]:
        """Apply an object server-side. Fields in `body` override other field managers. Raises Refused."""
        mode = ["--dry-run=server"] if dry_run else []
        options = ["--server-side", "--force-conflicts", f"--field-manager={FIELD_MANAGER}", *mode]
        return self._json("apply", *options, "--filename=-", stdin=json.dumps(body))

    def patch(self, resource: str, name: str, change: dict[str, Any]) -> dict[str, Any]:
        """Merge a change into an object. Raises ObjectMissing and Refused."""
        options = ["--type=merge", f"--field-manager={FIELD_MANAGER}", f"--patch={json.dumps(change)}"]
        return self._json("patch", resource, name, *options)

    def exec(self, where: tuple[str, str, str], command: Sequence[str]) -> bytes:
        """Return the standard output of a command in a container.

        Args:
            where: namespace, pod, container.

        Raises:
            CommandFailed: the command failed; the text is its own.
        """
        namespace, pod, container = where
        elsewhere = replace(self.target, namespace=namespace)
        command_line = [self.program, "exec", pod, f"--container={container}", *elsewhere.flags(), "--", *command]
        return self._ran(command_line, None)

    def namespace(self) -> str:
        """Return the namespace of commands that name none."""
        if self.target.namespace is not None:
            return self.target.namespace
        shown = self._run(("config", "view", "--minify", "--output=jsonpath={..namespace}"), None)
        return shown.strip() or "default"

    def _json(self, *arguments: str, stdin: str | None = None) -> dict[str, Any]:
        options = ("--output=json", f"--request-timeout={REQUEST_TIMEOUT_S}s")
        answer = self._run((*arguments, *options), stdin)
        try:
            parsed: dict[str, Any] = json.loads(answer)
        except ValueError as error:
            raise CommandFailed(f"kubectl's output is not JSON: {answer[:200]!r}") from error
        return parsed

    def _run(self, arguments: Sequence[str], stdin: str | None) -> str:
        data = stdin.encode() if stdin is not None else None
        return self._ran([self.program, *arguments, *self.target.flags()], data).decode(errors="replace")

    def _ran(self, command: Sequence[str], stdin: bytes | None) -> bytes:
        try:
            done = subprocess.run(command, input=stdin, capture_output=True, check=False, timeout=_PROCESS_TIMEOUT_S)
        except FileNotFoundError as error:
            text = f"{self.program} is not on PATH: install it (https://kubernetes.io/docs/tasks/tools)"
            raise KubectlMissing(text) from error
        except subprocess.TimeoutExpired as error:
            raise error_of(f"kubectl: i/o timeout after {_PROCESS_TIMEOUT_S:g} s") from error
        if done.returncode != 0:
            raise error_of(done.stderr.decode(errors="replace"))
        return done.stdout
