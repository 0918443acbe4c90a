"""The node does what a Kubernetes does, before anything of ours is installed on it."""

import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from marlaas_e2e import images
from marlaas_e2e.handle import ClusterHandle, read_only_folder
from marlaas_e2e.images import BASE, RECIPES
from marlaas_e2e.kubectl import CommandFailed
from marlaas_e2e.node.layout import METADATA_ADDRESS, OUTSIDE_ADDRESS
from marlaas_e2e.node.store import ImageStore

NAMESPACE = "cluster-itself"
WAIT_S = 60.0
_LOCKED = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_NOBODY = {
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "runAsGroup": 10001,
    "fsGroup": 10001,
    "seccompProfile": {"type": "RuntimeDefault"},
}
_SERVE = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port={port}, bind='0.0.0.0')"
pytestmark = pytest.mark.skipif(
    "E2E_CONTEXT" in os.environ, reason="about the node on this machine; E2E_CONTEXT is another cluster"
)


def pod(name: str, *, port: int = 8080, **spec: Any) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": BASE,
        "command": ["python3", "-c", _SERVE.format(port=port)],
        "workingDir": "/tmp",
        "securityContext": _LOCKED,
        "readinessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 1},
        "volumeMounts": [
            {"name": volume["name"], "mountPath": f"/{volume['name']}"} for volume in spec.get("volumes", [])
        ],
    }
    body = {"terminationGracePeriodSeconds": 1, "securityContext": _NOBODY, "containers": [container], **spec}
    metadata = {"name": name, "namespace": NAMESPACE, "labels": {"app": name}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": body}


@pytest.fixture(scope="module")
def server(cluster: ClusterHandle) -> Iterator[ClusterHandle]:
    """The cluster with a namespace under the restricted level, a web server `web` with a service, and a pod `client`."""
    cluster.import_image(images.base_archive())
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": restricted}})
    service = {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]}
    cluster.apply(
        pod("web"),
        pod("client"),
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", "namespace": NAMESPACE}, "spec": service},
    )
    ready(cluster, "web", "client")
    yield cluster
    cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def ready(cluster: ClusterHandle, *pods: str) -> None:
    cluster.kubectl(
        "-n", NAMESPACE, "wait", "--for=condition=Ready", "--timeout=60s", *(f"pod/{name}" for name in pods)
    )


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not (held := condition()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return held


def python(cluster: ClusterHandle, name: str, code: str) -> str:
    return cluster.kubectl("-n", NAMESPACE, "exec", name, "--", "python3", "-c", code)


_TRIES = """
import socket, sys
from concurrent.futures import ThreadPoolExecutor
def reached(target):
    try:
        socket.create_connection(target, timeout=1).close()
    except OSError:
        return False
    return True
targets = {targets!r}
with ThreadPoolExecutor() as pool:
    print(*[target[0] for target, there in zip(targets, pool.map(reached, targets)) if there])
"""


def reached(cluster: ClusterHandle, *targets: tuple[str, int]) -> list[str]:
    """Those that the pod `client` can connect to."""
    return python(cluster, "client", _TRIES.format(targets=targets)).split()


def claimed_volumes(cluster: ClusterHandle) -> list[str]:
    volumes = cluster.get("persistentvolumes")["items"]
    return [each["metadata"]["name"] for each in volumes if each["spec"]["claimRef"]["name"] == "data"]


def test_names_of_services_resolve_and_lead_to_their_pods(server: ClusterHandle) -> None:
    names = ["web", f"web.{NAMESPACE}.svc.cluster.local"]
    assert eventually(lambda: reached(server, *((name, 80) for name in names), ("nobody", 80)) == names)


def test_network_policies_are_enforced_and_go_away_with_their_object(server: ClusterHandle) -> None:
    def policy(*egress: Any) -> None:
        spec = {"podSelector": {"matchLabels": {"app": "client"}}, "policyTypes": ["Egress"], "egress": list(egress)}
        metadata = {"name": "client", "namespace": NAMESPACE}
        server.apply(
            {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}
        )

    api, web_service = (
        server.get("service", name, "-n", namespace)["spec"]["clusterIP"]
        for name, namespace in (("kubernetes", "default"), ("web", NAMESPACE))
    )
    targets = [(web_service, 80), (OUTSIDE_ADDRESS, 80), (METADATA_ADDRESS, 80), (api, 443)]

    def reaches(*wanted: str) -> bool:
        return eventually(lambda: reached(server, *targets) == list(wanted))

    assert reaches(web_service, OUTSIDE_ADDRESS, METADATA_ADDRESS, api)
    policy()
    assert reaches()
    dns = {
        "to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}],
        "ports": [{"port": 53, "protocol": "UDP"}],
    }
    web = {"to": [{"podSelector": {"matchLabels": {"app": "web"}}}], "ports": [{"port": 8080}]}
    policy(dns, web)
    assert reaches(web_service)
    assert eventually(lambda: reached(server, ("web", 80)) == ["web"])
    policy({"to": [{"ipBlock": {"cidr": "198.51.100.0/24"}}], "ports": [{"port": 80}]})
    assert reaches(OUTSIDE_ADDRESS)
    server.kubectl("-n", NAMESPACE, "delete", "networkpolicy", "client")
    assert reaches(web_service, OUTSIDE_ADDRESS, METADATA_ADDRESS, api)


def test_a_claim_gets_a_folder_that_the_pods_group_may_write(server: ClusterHandle) -> None:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    metadata = {"name": "data", "namespace": NAMESPACE}
    server.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec})
    server.apply(pod("writer", volumes=[{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]))
    ready(server, "writer")
    assert python(server, "writer", "open('/data/x', 'w').write('kept'); print(open('/data/x').read())") == "kept\n"
    server.kubectl("-n", NAMESPACE, "delete", "pod/writer", "persistentvolumeclaim/data")
    assert eventually(lambda: claimed_volumes(server) == [])


def test_a_folder_of_the_machine_is_mounted_read_only(server: ClusterHandle) -> None:
    server.apply(*read_only_folder(NAMESPACE, "recipes", RECIPES))
    claim = {"claimName": "recipes", "readOnly": True}
    server.apply(pod("reader", volumes=[{"name": "recipes", "persistentVolumeClaim": claim}]))
    ready(server, "reader")
    assert json.loads(
        python(server, "reader", "import json, os; print(json.dumps(sorted(os.listdir('/recipes'))))")
    ) == sorted(each.name for each in RECIPES.iterdir())
    with pytest.raises(CommandFailed, match="Read-only"):
        python(server, "reader", "open('/recipes/x', 'w')")
    server.kubectl("delete", "persistentvolume", f"recipes-{NAMESPACE}", "--wait=false")


def test_a_killed_container_is_started_again(server: ClusterHandle) -> None:
    server.kill_container(NAMESPACE, "web", "main")

    def restarts() -> int:
        return int(server.get("pod", "web", "-n", NAMESPACE)["status"]["containerStatuses"][0]["restartCount"])

    assert eventually(lambda: restarts() == 1)
    ready(server, "web")


def test_an_image_that_is_dropped_is_gone_under_all_its_names_and_may_come_again(server: ClusterHandle) -> None:
    assert server.layout is not None
    store = ImageStore(server.layout)
    digest = store.digests()[BASE]
    server.drop_image(BASE)
    assert digest not in store.digests().values()
    server.import_image(images.base_archive())
    assert store.digests()[BASE] == digest


def test_the_restricted_level_refuses_a_privileged_pod(server: ClusterHandle) -> None:
    with pytest.raises(CommandFailed, match="violates PodSecurity"):
        server.apply(pod("root", hostNetwork=True))
