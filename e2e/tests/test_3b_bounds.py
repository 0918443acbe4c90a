"""What a job may open and what a pool may demand: one more address, and another runtime, for the sandbox of a running job."""

import json
from collections.abc import Iterator

import pytest

from marlaas_e2e.api import Object
from marlaas_e2e.platform import Platform, manifest

TEAM, JOB, RUNTIME = "team-n", "curious", "plain"
SANDBOX = "app.kubernetes.io/component=sandbox"
RUNTIME_CLASS: Object = {
    "apiVersion": "node.k8s.io/v1",
    "kind": "RuntimeClass",
    "metadata": {"name": RUNTIME},
    "handler": "runc",
}
_PROBE = """
import json, socket, sys
def reach(host, port):
    try:
        socket.create_connection((host, port), timeout=2).close()
        return "open"
    except OSError as error:
        return type(error).__name__
print(json.dumps([reach(*place) for place in json.loads(sys.argv[1])]))
"""


def demand(platform: Platform, runtime: str | None) -> None:
    body = json.dumps({"spec": {"sandbox": {"runtimeClassName": runtime}}})
    platform.kubectl("patch", "modelpool", "tiny", "--type=merge", "--patch", body)


@pytest.fixture(scope="module")
def sandbox(platform: Platform) -> Iterator[Object]:
    """The pod of a job that opens the API server's own address and nothing else, in a pool that demands a runtime."""
    platform.tiny_pool()
    platform.tenant(TEAM)
    platform.apply(RUNTIME_CLASS)
    demand(platform, RUNTIME)
    (body,) = manifest("endless")
    body["metadata"] = {"name": JOB, "namespace": TEAM}
    address, port = api_server(platform)
    body["spec"]["environment"]["egress"] = [{"cidr": f"{address}/32", "ports": [port]}]
    platform.apply(body)
    ready = lambda: platform.condition("rljob", JOB, "SandboxReady", TEAM).get("status") == "True"  # noqa: E731
    platform.until(ready, "the sandbox is ready")
    (name,) = platform.names("pods", TEAM, SANDBOX)
    yield platform.get("pod", name.removeprefix("pod/"), TEAM)
    platform.kubectl("delete", "rljob", JOB, "-n", TEAM, "--timeout=120s")
    demand(platform, None)
    platform.kubectl("delete", "runtimeclass", RUNTIME)


def api_server(platform: Platform) -> tuple[str, int]:
    """Where the API server really is; its Service is only a name for that."""
    chosen = ("-n", "default", "-l", "kubernetes.io/service-name=kubernetes")
    (behind, *_) = platform.cluster.get("endpointslices", *chosen)["items"]
    return str(behind["endpoints"][0]["addresses"][0]), int(behind["ports"][0]["port"])


def test_a_sandbox_reaches_what_its_job_opens_and_no_other_port_of_it(platform: Platform, sandbox: Object) -> None:
    address, port = api_server(platform)
    places = json.dumps([(address, port), (sandbox["status"]["hostIP"], 10250)])
    program = ("exec", "-n", TEAM, sandbox["metadata"]["name"], "--", "python3", "-c", _PROBE, places)
    opened, kubelet = json.loads(platform.kubectl(*program))
    assert opened == "open"
    assert kubelet != "open"


def test_a_sandbox_runs_where_its_pool_says(sandbox: Object) -> None:
    assert sandbox["spec"]["runtimeClassName"] == RUNTIME
    assert sandbox["status"]["phase"] == "Running"


def test_a_pools_new_demand_restarts_no_engine(platform: Platform, sandbox: Object) -> None:
    assert platform.condition("modelpool", "tiny", "Ready")["status"] == "True"
    engine = platform.get("pod", "tiny-rollout-0", "marlaas-system")
    assert engine["metadata"]["creationTimestamp"] < sandbox["metadata"]["creationTimestamp"]
