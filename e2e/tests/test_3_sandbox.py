"""What environment code can reach from inside a sandbox pod of a running job: its bus, and nothing else."""

from collections.abc import Iterator

import pytest
from tests.tables import data

from marlaas_e2e.api import Object
from marlaas_e2e.images import BASE
from marlaas_e2e.platform import NAMESPACE, Places, Platform, endless, plain_pool, tenant

TEAM, JOB, IMPOSTOR = "team-c", "endless", "impostor"


def begin(_: Platform) -> list[Object]:
    return [*plain_pool(), *tenant(TEAM), endless(JOB, TEAM), impostor()]


def impostor() -> Object:
    """A pod that a tenant may make, with the labels of a sandbox."""
    locked = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    main = {"name": "main", "image": BASE, "command": ["sleep", "infinity"], "securityContext": locked}
    nobody = {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}}
    spec: Object = {"securityContext": nobody, "terminationGracePeriodSeconds": 1, "containers": [main]}
    labels = {"app.kubernetes.io/name": "marlaas", "app.kubernetes.io/component": "sandbox"}
    metadata = {"name": IMPOSTOR, "namespace": TEAM, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@pytest.fixture(scope="module")
def pod(platform: Platform) -> Iterator[str]:
    """The sandbox, which has connected to the bus: its address is known to the policies."""
    platform.until(lambda: platform.step(JOB, TEAM), "the first step", 600)
    yield platform.ready_pod(TEAM, f"marlaas.dev/job={JOB}")["metadata"]["name"]
    platform.kubectl("delete", f"rljob/{JOB}", f"pod/{IMPOSTOR}", "-n", TEAM, "--wait=false")


@pytest.fixture(scope="module")
def places(platform: Platform) -> Places:
    bus = platform.get("service", "marlaas-nats", NAMESPACE)["spec"]["clusterIP"]
    engine = platform.get("pod", "plain-rollout-0", NAMESPACE)["status"]
    service = platform.get("service", "kubernetes", "default")["spec"]
    return {
        "bus": (bus, 4222),
        "bus monitor": (bus, 8222),
        "API server": (service["clusterIP"], service["ports"][0]["port"]),
        "API server's own address": platform.api_server(),
        "kubelet": (engine["hostIP"], 10250),
        "engine": (engine["podIP"], 8081),
        "metadata": ("169.254.169.254", 80),
        "another cloud's metadata": ("168.63.129.16", 80),
    }


def test_a_sandbox_reaches_the_bus_and_nothing_else_and_no_neighbour_reaches_it(platform, pod, places):
    assert platform.opened(places, pod, "supervisor", TEAM) == {"bus"}
    health = {"health": (platform.get("pod", pod, TEAM)["status"]["podIP"], 8081)}
    assert not platform.opened(health, "plain-trainer-0", "trainer", NAMESPACE)


def test_a_tenants_own_pod_does_not_reach_the_bus_whatever_it_calls_itself(platform, places):
    """It does reach what no policy of ours closes, so the closed places of a sandbox are there."""
    platform.kubectl("wait", f"pod/{IMPOSTOR}", "-n", TEAM, "--for=condition=Ready", "--timeout=60s")
    closed = lambda: not platform.opened(places, IMPOSTOR, "main", TEAM) & {"bus", "bus monitor", "engine"}  # noqa: E731
    platform.until(closed, "bus and engine are closed to a pod of a tenant")
    assert {"API server", "metadata"} <= platform.opened(places, IMPOSTOR, "main", TEAM)


def test_a_sandbox_has_its_pools_runtime_and_no_token_and_cannot_write_its_root(platform, pod):
    assert platform.get("pod", pod, TEAM)["spec"]["runtimeClassName"] == "runc"
    printed = platform.python(pod, "supervisor", data(__file__, "supervisor_surroundings"), namespace=TEAM)
    assert printed.strip() == "[False, False, False] {0} ['2']"


def test_environment_code_cannot_read_the_credential_beside_it(platform, pod):
    printed = platform.python(pod, "supervisor", data(__file__, "seclusion"), namespace=TEAM)
    assert printed.strip() == "True True refused"
