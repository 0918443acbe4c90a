"""What we promise of pods beyond the restricted level of Pod Security, which a real API server checks."""

from collections.abc import Mapping
from typing import Any


def beyond(pod: Mapping[str, Any]) -> list[str]:
    """What the pod breaks of our own rules: a read-only root, the last words kept."""
    found = []
    for container in _containers(pod):
        if not container["securityContext"].get("readOnlyRootFilesystem"):
            found.append(f"{container['name']}: its root can be written")
        if container.get("terminationMessagePolicy") != "FallbackToLogsOnError":
            found.append(f"{container['name']}: its last words are lost")
    return found


def holds_token(pod: Mapping[str, Any]) -> bool:
    return pod.get("automountServiceAccountToken") is not False


def _containers(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*pod.get("initContainers", ()), *pod["containers"]]
