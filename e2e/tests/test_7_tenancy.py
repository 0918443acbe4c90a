"""A hostile editor of one namespace, bound to `marlaas-rljob-editor` alone: what each try at something else meets."""

import json
from collections.abc import Iterable
from typing import Any

import pytest

from marlaas_e2e.api import Object
from marlaas_e2e.kubectl import CommandFailed
from marlaas_e2e.platform import NAMESPACE, RELEASE, Platform, endless, manifest, plain_pool, tenant

HOME, ELSEWHERE, EDITOR = "team-g", "team-h", "ed"
JOB, NEIGHBOUR, THIEF = "hostile", "neighbour", "thief"
GROUP = "rbac.authorization.k8s.io"
BINDING: Object = {
    "apiVersion": f"{GROUP}/v1",
    "kind": "RoleBinding",
    "metadata": {"name": "ed-edits", "namespace": HOME},
    "roleRef": {"apiGroup": GROUP, "kind": "ClusterRole", "name": f"{RELEASE}-rljob-editor"},
    "subjects": [{"kind": "User", "name": EDITOR, "apiGroup": GROUP}],
}

REQUESTS = f"""
get secrets
get secret {JOB}-sandbox
get secret {RELEASE}-bus -n {NAMESPACE}
create secret generic mine --dry-run=server
get configmaps -n {NAMESPACE}
create token default
get pods
get pods -n {NAMESPACE}
exec deployment/{RELEASE}-operator -n {NAMESPACE} -- id
logs deployment/{JOB}-sandbox
run mine --image=x:1 --dry-run=server
create deployment mine --image=x:1 --dry-run=server
create rolebinding mine --clusterrole=cluster-admin --user={EDITOR} --dry-run=server
create clusterrolebinding mine --clusterrole=cluster-admin --user={EDITOR} --dry-run=server
get nodes
get --raw /api/v1/nodes/node1/proxy/pods
get --raw /api/v1/namespaces/{NAMESPACE}/services/{RELEASE}-nats:8222/proxy/
label namespace {HOME} pod-security.kubernetes.io/enforce-
delete networkpolicy {JOB}-sandbox --dry-run=server
delete validatingadmissionpolicy {RELEASE}-job-secret-refs --dry-run=server
get rljobs -n {ELSEWHERE}
delete rljob {NEIGHBOUR} -n {ELSEWHERE} --dry-run=server
get persistentvolumeclaims -n {NAMESPACE}
create -f - --dry-run=server|tenant
create -f - --dry-run=server|pool
patch modelpool plain --type=merge --dry-run=server -p {{"spec":{{"namespaces":["{HOME}"]}}}}
patch rljob {JOB} --subresource=status --type=merge --dry-run=server -p {{"status":{{"tenant":"rich"}}}}
"""
"""Requests that RBAC forbids; after `|`, the object on standard input."""

FORGED: dict[str, Object] = {
    "tenant": {"kind": "Tenant", "metadata": {"name": "rich"}, "spec": {"namespaces": [HOME], "weight": 1000}},
    "pool": {"kind": "ModelPool", "metadata": {"name": "mine"}, "spec": {"model": {"path": "/"}}},
}

JOBS: list[tuple[str, Object, str]] = [
    ("Secret by name", {"secretRefs": [{"name": "login"}]}, "Secret login may not be read by ed"),
    ("pull Secret", {"imagePullSecrets": [{"name": "login"}]}, "Secret login may not be read by ed"),
    ("credential of a job", {"secretRefs": [{"name": f"{JOB}-sandbox"}]}, "holds a job's bus credential"),
    ("API server", {"egress": [{"cidr": "10.96.0.1/32", "ports": [443]}]}, "10.96.0.1/32 is not open to jobs"),
    ("pods", {"egress": [{"cidr": "10.244.0.0/24"}]}, "10.244.0.0/24 is not open to jobs"),
    ("node", {"egress": [{"cidr": "172.30.0.2/32", "ports": [10250]}]}, "172.30.0.2/32 is not open to jobs"),
    ("loopback", {"egress": [{"cidr": "127.0.0.0/8"}]}, "127.0.0.0/8 is not open to jobs"),
    ("private IPv6", {"egress": [{"cidr": "fd00::/8"}]}, "fd00::/8 is not open to jobs"),
    ("metadata", {"egress": [{"cidr": "169.254.169.254/32"}]}, "no environment may reach it"),
    ("root", {"securityContext": {"runAsUser": 0}}, 'unknown field "spec.environment.securityContext"'),
    ("account", {"serviceAccountName": "default"}, 'unknown field "spec.environment.serviceAccountName"'),
    ("volume", {"volumes": [{"hostPath": {"path": "/"}}]}, 'unknown field "spec.environment.volumes"'),
    ("host network", {"hostNetwork": True}, 'unknown field "spec.environment.hostNetwork"'),
    ("host port", {"ports": [{"hostPort": 80}]}, 'unknown field "spec.environment.ports"'),
    ("variables", {"envFrom": [{"secretRef": {"name": "login"}}]}, 'unknown field "spec.environment.envFrom"'),
    ("node by label", {"nodeSelector": {"a": "b"}}, 'unknown field "spec.environment.nodeSelector"'),
    ("taints", {"tolerations": [{"operator": "Exists"}]}, 'unknown field "spec.environment.tolerations"'),
    ("pod priority", {"priorityClassName": "above-others"}, 'unknown field "spec.environment.priorityClassName"'),
    ("runtime", {"runtimeClassName": "runc"}, 'unknown field "spec.environment.runtimeClassName"'),
]  # fmt: skip
"""Environments of a job that the API server refuses, each with a part of its answer."""

CHANGES: list[tuple[Object, str]] = [
    ({"environment": {"secretRefs": [{"name": "login"}]}}, "cannot change once the job exists"),
    ({"environment": {"image": "x:1"}}, "cannot change once the job exists"),
    ({"environment": {"egress": [{"cidr": "8.8.8.8/32"}]}}, "cannot change once the job exists"),
    ({"priority": 1001}, "less than or equal to 1000"),
    ({"poolRef": {"name": "absent"}}, "cannot change once the job exists"),
]

# Each try raises OSError unless it succeeds; the program prints the names of those that did.
_BREAKOUT = """
import ctypes, json, os, socket, stat, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number):
    if number: raise OSError(ctypes.get_errno())
tries = {
    "root": lambda: os.setuid(0),
    "group": lambda: os.setgroups([0]),
    "mount": lambda: call(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)),
    "user namespace": lambda: call(libc.unshare(0x10000000)),
    "chroot": lambda: os.chroot("/tmp"),
    "device": lambda: os.mknod("/tmp/disk", stat.S_IFBLK | 0o600, os.makedev(8, 0)),
    "raw socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
    "packet socket": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
    "low port": lambda: open("/proc/sys/net/ipv4/ip_unprivileged_port_start", "w"),
    "host name": lambda: socket.sethostname("mine"),
    "root file system": lambda: open("/usr/mine", "w"),
    "core pattern": lambda: open("/proc/sys/kernel/core_pattern", "w"),
    "kernel log": lambda: open("/dev/kmsg"),
    "memory": lambda: open("/dev/mem"),
    "token": lambda: open("/var/run/secrets/kubernetes.io/serviceaccount/token"),
    "bus credential": lambda: open("/etc/marlaas/bus/bus.creds"),
    "runtime": lambda: socket.socket(socket.AF_UNIX).connect("/run/containerd/containerd.sock"),
    "blobs": lambda: os.listdir("/var/lib/marlaas/blobs"),
}
done = []
for name, attempt in tries.items():
    try:
        attempt(); done.append(name)
    except OSError:
        pass
print(json.dumps([len(tries), done]))
"""

# With the credential of a sandbox: subjects that the bus lets it publish or subscribe to.
_ON_THE_BUS = """
import asyncio, json, sys, nats
async def main():
    url, *subjects = sys.argv[1:]
    errors = []
    async def note(error): errors.append(str(error).lower())
    bus = await nats.connect(url, user_credentials="/etc/marlaas/bus/bus.creds", error_cb=note, inbox_prefix="_INBOX_x")
    for subject in subjects:
        if subject.startswith("<"): await bus.subscribe(subject[1:])
        else: await bus.publish(subject, b"{}")
    for _ in range(3): await bus.flush()  # the answers have come, and their callbacks have run
    refused = " ".join(errors)
    print(json.dumps([one for one in subjects if f'to "{one.lstrip("<").lower()}"' not in refused]))
asyncio.run(main())
"""
OWN = f"gen.{HOME}.{JOB}.policy"
SUBJECTS = f"""
{OWN} <> <gen.*.*.* <_INBOX_{ELSEWHERE}_{NEIGHBOUR}.> <$KV.tenants.>
gen.{ELSEWHERE}.{NEIGHBOUR}.policy episode.{ELSEWHERE}.{NEIGHBOUR} task.{HOME}.{JOB} turn.{HOME}.{JOB}.e.0
$KV.jobs.{HOME}.{JOB} $KV.jobs.{ELSEWHERE}.{NEIGHBOUR} $KV.tenants.rich $KV.policy.{HOME}.{JOB}.policy
$JS.API.STREAM.MSG.GET.TURNS $JS.API.STREAM.PURGE.TURNS $JS.API.CONSUMER.CREATE.EPISODES
$JS.API.DIRECT.GET.KV_jobs.$KV.jobs.{ELSEWHERE}.{NEIGHBOUR} $SYS.REQ.SERVER.PING
"""


def begin(_: Platform) -> list[Object]:
    """The hostile job opens all that a job may open; the thief starts from a folder of the blob store."""
    _, job = manifest("own-image")
    job["metadata"] = {"name": JOB, "namespace": HOME, "labels": {"marlaas.dev/tenant": "rich"}}
    environment = job["spec"]["environment"]
    del environment["secretRefs"]
    environment["entrypoint"] = ["env", "MIRROR_LETTERS=abc", *environment["entrypoint"]]
    environment["egress"] = [{"cidr": "0.0.0.0/0"}, {"cidr": "::/0"}]
    stolen = [{"name": "policy", "initFrom": {"path": f"/var/lib/marlaas/blobs/{ELSEWHERE}"}}]
    objects = [job, endless(NEIGHBOUR, ELSEWHERE), endless(THIEF, HOME, agents=stolen)]
    return [*plain_pool(), *tenant(HOME), *tenant(ELSEWHERE), BINDING, *objects]


def refusal(platform: Platform, *words: str, stdin: str | None = None) -> str:
    """What the API server answers the editor; empty if it did what was asked."""
    try:
        platform.kubectl("--as", EDITOR, "-n", HOME, *words, stdin=stdin)
    except CommandFailed as error:
        return str(error)
    return ""


def create(platform: Platform, **environment: object) -> str:
    """As `refusal`, for a job with a part of the environment replaced; a dry run."""
    body = endless("mine", HOME, environment={"name": "reverse", **environment})
    return refusal(platform, "create", "--dry-run=server", "-f", "-", stdin=json.dumps(body))


@pytest.fixture(scope="module")
def editor(platform: Platform) -> Platform:
    platform.until(lambda: not create(platform), "the editor may create jobs")
    return platform


@pytest.fixture(scope="module")
def pod(platform: Platform) -> str:
    """The hostile job's sandbox, which has connected to the bus: its address is known to the policies."""
    platform.until(lambda: platform.step(JOB, HOME), "the first step", 600)
    return str(platform.ready_pod(HOME, f"marlaas.dev/job={JOB}")["metadata"]["name"])


@pytest.mark.parametrize("request_", REQUESTS.strip().splitlines())
def test_the_api_server_forbids_all_but_rljobs_of_the_namespace(editor, request_):
    words, _, forged = request_.partition("|")
    body = {"apiVersion": "marlaas.dev/v1alpha1", **FORGED[forged]} if forged else {}
    assert "forbidden" in refusal(editor, *words.split(), stdin=json.dumps(body)).lower()


@pytest.mark.parametrize(("environment", "sentence"), [each[1:] for each in JOBS], ids=[each[0] for each in JOBS])
def test_a_job_names_nothing_that_is_not_its_authors(editor, environment, sentence):
    assert sentence in create(editor, **environment)


@pytest.mark.parametrize(("spec", "sentence"), CHANGES)
def test_a_job_gains_nothing_by_a_change(editor, spec, sentence):
    change = ("--type=merge", "--dry-run=server", "-p", json.dumps({"spec": spec}))
    assert sentence in refusal(editor, "patch", "rljob", JOB, *change)


def test_unknown_fields_and_a_forged_status_are_dropped_and_labels_make_no_tenant(editor, pod):
    forged = {"hostNetwork": True, "tenant": "rich", "weight": 1000}
    body = endless("mine", HOME, **forged) | {"status": {"tenant": "rich"}}
    words = ("--as", EDITOR, "create", "--dry-run=server", "--validate=ignore", "-o", "json", "-f", "-")
    created: dict[str, Any] = json.loads(editor.kubectl(*words, stdin=json.dumps(body)))
    assert not forged.keys() & created["spec"].keys()
    assert "status" not in created
    assert editor.status("rljob", JOB, HOME)["tenant"] == f"namespace/{HOME}"
    assert "rich" not in editor.get("pod", pod, HOME)["metadata"]["labels"].values()


def test_egress_to_everywhere_opens_public_addresses_alone(platform, pod):
    def addresses(namespace: str, names: Iterable[str]) -> dict[str, str]:
        pods = platform.cluster.get("pods", "-n", namespace)["items"]
        found = {name: [each for each in pods if name in each["metadata"]["name"]] for name in names}
        return {name: each[0]["status"]["podIP"] for name, each in found.items()}

    engine = platform.get("pod", "plain-rollout-0", NAMESPACE)["status"]
    node = engine["hostIP"]
    ours = addresses(NAMESPACE, ("operator", "orchestrator", "plain-trainer", "nats"))
    places = {
        "public": ("198.51.100.10", 80),
        "bus": (ours["nats"], 4222),
        "bus monitor": (ours["nats"], 8222),
        "API server": ("10.96.0.1", 443),
        "API server's own address": platform.api_server(),
        "kubelet": (node, 10250),
        "etcd": (node, 2379),
        "containers' ports on the node": (node, 8081),
        "operator": (ours["operator"], 8080),
        "orchestrator": (ours["orchestrator"], 8081),
        "engine": (engine["podIP"], 8081),
        "trainer": (ours["plain-trainer"], 8081),
        "neighbour": (addresses(ELSEWHERE, (NEIGHBOUR,))[NEIGHBOUR], 8081),
        "metadata": ("169.254.169.254", 80),
        "another cloud's metadata": ("168.63.129.16", 80),
    }
    assert platform.opened(places, pod, "environment", HOME) == {"public", "bus"}
    assert platform.opened(places, "plain-trainer-0", "trainer", NAMESPACE) == {"bus", "trainer"}


def test_environment_code_gains_nothing_in_its_container(platform, pod):
    assert json.loads(platform.python(pod, "environment", _BREAKOUT, namespace=HOME)) == [18, []]


def test_the_bus_opens_no_subject_of_others_to_a_stolen_credential(platform, pod):
    url = f"nats://{RELEASE}-nats.{NAMESPACE}.svc:4222"
    opened = platform.python(pod, "supervisor", _ON_THE_BUS, url, *SUBJECTS.split(), namespace=HOME)
    assert json.loads(opened) == [OWN]


def test_a_job_starts_from_no_adapter_of_the_blob_store(platform):
    status = platform.ended(THIEF, HOME)
    assert (status["phase"], "adapter_config.json" in status["message"]) == ("Failed", True), status["message"]
    for job, namespace in ((JOB, HOME), (THIEF, HOME), (NEIGHBOUR, ELSEWHERE)):
        platform.kubectl("delete", "rljob", job, "-n", namespace, "--wait=false")
