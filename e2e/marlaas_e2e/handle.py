"""What a scenario test does to a cluster: ours on this machine, or the one of E2E_CONTEXT."""

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import SkipTest

from marlaas_e2e import binaries
from marlaas_e2e.elsewhere import Elsewhere
from marlaas_e2e.images import tag_of
from marlaas_e2e.kubectl import run
from marlaas_e2e.node import host
from marlaas_e2e.node.layout import Layout
from marlaas_e2e.node.store import ImageStore


class NotHere(SkipTest):
    """Only the node on this machine can do that; with E2E_CONTEXT a test that needs it is skipped."""


@dataclass(frozen=True, slots=True)
class ClusterHandle:
    """A cluster with an administrator's access. `layout` is None for the cluster of a kubeconfig context."""

    kubeconfig: Path
    context: str
    layout: Layout | None = None

    def kubectl(self, *arguments: str | Path, stdin: str | None = None, timeout_s: float = 600) -> str:
        return self._run("kubectl", ["--context", self.context, *arguments], stdin, timeout_s)

    def helm(self, *arguments: str | Path, timeout_s: float = 600) -> str:
        return self._run("helm", ["--kube-context", self.context, *arguments], None, timeout_s)

    def get(self, *arguments: str) -> Any:
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def import_image(self, archive: Path) -> None:
        """Bring an archive that `images` made into the cluster.

        With E2E_CONTEXT by the command E2E_LOAD (for example `kind load image-archive`); without it the images must be in the cluster's reach
        already. Raises CommandFailed.
        """
        if self.layout is not None:
            ImageStore(self.layout).bring(archive)
        elif command := Elsewhere.said().loading(archive, tag_of(archive)):
            run(command)

    def drop_image(self, tag: str) -> None:
        """Remove an image from this machine's node; another cluster looks after its disks itself."""
        if self.layout is not None:
            ImageStore(self.layout).drop(tag)

    def container_pid(self, namespace: str, pod: str, container: str) -> int:
        """Process id, on this machine, of a container's first process. Raises NotHere, LookupError."""
        if self.layout is None:
            raise NotHere("processes of containers are only seen on the node of this machine")
        statuses = self.get("pod", pod, "--namespace", namespace)["status"].get("containerStatuses", [])
        for status in statuses:
            if (
                status["name"] == container
                and (pid := host.container_pid(status.get("containerID") or "-")) is not None
            ):
                return pid
        raise LookupError(f"{namespace}/{pod} has no running container {container}")

    def kill_container(self, namespace: str, pod: str, container: str) -> None:
        """`kill -9` from outside, as the kernel would for memory. Raises NotHere, LookupError: nothing was there to kill."""
        try:
            os.kill(self.container_pid(namespace, pod, container), signal.SIGKILL)
        except ProcessLookupError as error:
            raise LookupError(f"{namespace}/{pod}: {container} ended by itself") from error

    def _run(self, program: str, arguments: Sequence[str | Path], stdin: str | None, timeout_s: float) -> str:
        path = binaries.ensure([program])[program]
        return run([path, "--kubeconfig", self.kubeconfig, *arguments], stdin, timeout_s)
