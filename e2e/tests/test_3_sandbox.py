"""What environment code can reach from inside a sandbox pod of a running job: its bus, and nothing else."""

import json
from collections.abc import Iterator

import pytest

from marlaas_e2e.api import Object
from marlaas_e2e.images import BASE
from marlaas_e2e.platform import NAMESPACE, Platform, manifest

TEAM = "team-c"
_PROBE = """
import json, socket, sys
def reach(host, port):
    try:
        socket.create_connection((host, port), timeout=2).close()
        return "open"
    except OSError as error:
        return type(error).__name__
print(json.dumps({name: reach(*place) for name, place in json.loads(sys.argv[1]).items()}))
"""


@pytest.fixture(scope="module")
def sandbox(platform: Platform) -> Iterator[str]:
    """A sandbox pod at work."""
    platform.tiny_pool()
    platform.tenant(TEAM)
    platform.apply(*manifest("endless"))
    ready = lambda: platform.condition("rljob", "endless", "SandboxReady", TEAM).get("status") == "True"  # noqa: E731
    platform.until(ready, "the sandbox has claimed over the bus: its address is known to the policies", 180)
    (pod,) = platform.names("pods", TEAM, "app.kubernetes.io/component=sandbox")
    yield pod
    platform.kubectl("delete", "rljob", "endless", "-n", TEAM)


def python(platform: Platform, pod: str, program: str, *words: str) -> str:
    return platform.kubectl("exec", "-n", TEAM, pod, "--", "python3", "-c", program, *words)


def test_a_sandbox_reaches_the_bus_and_nothing_else(platform: Platform, sandbox: str) -> None:
    bus = platform.get("service", "marlaas-nats", NAMESPACE)["spec"]["clusterIP"]
    engine = platform.get("pod", "tiny-rollout-0", NAMESPACE)["status"]
    service = platform.get("service", "kubernetes", "default")["spec"]
    (behind, *_) = platform.cluster.get(
        "endpointslices", "-n", "default", "-l", "kubernetes.io/service-name=kubernetes"
    )["items"]
    places = {
        "bus": (bus, 4222),
        "bus monitor": (bus, 8222),
        "API server": (service["clusterIP"], service["ports"][0]["port"]),
        "API server's own address": (behind["endpoints"][0]["addresses"][0], behind["ports"][0]["port"]),
        "kubelet": (engine["hostIP"], 10250),
        "engine": (engine["podIP"], 8081),
        "metadata": ("169.254.169.254", 80),
        "another cloud's metadata": ("168.63.129.16", 80),
    }
    found = json.loads(python(platform, sandbox, _PROBE, json.dumps(places)))
    assert found.pop("bus") == "open"
    assert "open" not in found.values(), found


def test_a_sandbox_has_no_token_and_cannot_write_its_root(platform: Platform, sandbox: str) -> None:
    program = """
import os
found = [os.path.exists("/var/run/secrets/kubernetes.io"), os.getuid() == 0]
try:
    open("/usr/x", "w"); found.append(True)
except OSError:
    found.append(False)
status = open("/proc/self/status").read()
caps = [line.split()[1] for line in status.splitlines() if line.startswith(("CapEff", "CapPrm", "CapBnd"))]
seccomp = [line.split()[1] for line in status.splitlines() if line.startswith("Seccomp:")]
print(found, {int(c, 16) for c in caps}, seccomp)
"""
    assert python(platform, sandbox, program).strip() == "[False, False, False] {0} ['2']"


def test_a_neighbour_cannot_reach_into_a_sandbox(platform: Platform, sandbox: str) -> None:
    address = platform.get("pod", sandbox.removeprefix("pod/"), TEAM)["status"]["podIP"]
    program = _PROBE.replace("json.loads(sys.argv[1])", json.dumps({"health": (address, 8081)}))
    found = platform.kubectl("exec", "-n", NAMESPACE, "tiny-trainer-0", "--", "python3", "-c", program)
    assert "open" not in found


def test_a_tenants_own_pod_does_not_reach_the_bus_whatever_it_calls_itself(platform: Platform, sandbox: str) -> None:
    impostor = own_pod("impostor", {"app.kubernetes.io/name": "marlaas", "app.kubernetes.io/component": "sandbox"})
    platform.apply(impostor)
    platform.kubectl("wait", "pod/impostor", "-n", TEAM, "--for=condition=Ready", "--timeout=60s")
    bus = platform.get("service", "marlaas-nats", NAMESPACE)["spec"]["clusterIP"]
    places = json.dumps({"bus": (bus, 4222)})
    found = lambda: json.loads(python(platform, "impostor", _PROBE, places))["bus"] != "open"  # noqa: E731
    platform.until(found, "the bus is closed to a pod of a tenant", 120)
    platform.kubectl("delete", "pod", "impostor", "-n", TEAM, "--wait=false")


def own_pod(name: str, labels: dict[str, str]) -> Object:
    """A pod that a tenant may make, with labels of its choice."""
    nobody = {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}}
    main = {
        "name": "main",
        "image": BASE,
        "command": ["sleep", "600"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec: Object = {"securityContext": nobody, "terminationGracePeriodSeconds": 1, "containers": [main]}
    metadata = {"name": name, "namespace": TEAM, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def test_environment_code_cannot_read_the_credential_beside_it(platform: Platform, sandbox: str) -> None:
    program = """
from pathlib import Path
from marlaas_worker.sandbox.seclusion import seclude, secluded
creds = Path("/etc/marlaas/bus/bus.creds")
before = len(creds.read_text()) > 0
done = seclude(secluded(creds))
try:
    creds.read_text(); after = "read"
except PermissionError:
    after = "refused"
print(before, done, after)
"""
    assert python(platform, sandbox, program).strip() == "True True refused"
