"""The restricted Pod Security level, and what we promise beyond it, as a list of what a PodSpec breaks. Field by field from the standard
(kubernetes.io/docs/concepts/security/pod-security-standards)."""

from collections.abc import Iterator, Mapping
from typing import Any

_VOLUMES = frozenset(
    {"configMap", "emptyDir", "persistentVolumeClaim", "secret", "projected", "downwardAPI", "csi", "ephemeral"}
)
_PROFILES = {"seLinuxOptions", "windowsOptions", "procMount", "appArmorProfile", "sysctls"}


def violations(pod: Mapping[str, Any]) -> list[str]:
    """What the pod breaks; empty is good."""
    return [*_pod(pod), *(f"{c['name']}: {text}" for c in _containers(pod) for text in _container(c, pod))]


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


def _pod(pod: Mapping[str, Any]) -> Iterator[str]:
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(key):
            yield key
    for volume in pod.get("volumes", ()):
        if not set(volume) - {"name"} <= _VOLUMES:
            yield f"volume {volume['name']}"
    yield from _PROFILES & set(pod.get("securityContext", {}))


def _containers(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def _container(container: Mapping[str, Any], pod: Mapping[str, Any]) -> Iterator[str]:
    own = container.get("securityContext", {})
    context = {**pod.get("securityContext", {}), **own}
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    if own.get("privileged"):
        yield "privileged"
    yield from _PROFILES & set(own)
    if context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0:
        yield "runAsNonRoot"
    if context.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile"
    capabilities = own.get("capabilities", {})
    if capabilities.get("drop") != ["ALL"] or set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
        yield "capabilities"
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield "hostPort"
