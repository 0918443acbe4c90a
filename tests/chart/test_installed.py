"""The release on a real API server: taken, admission in force, the operator held to its own objects, uninstalled without a trace.

Pods do not run here (there is no node): what they do is in e2e/.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from marlaas_e2e.control_plane import ControlPlane
from marlaas_e2e.kubectl import CommandFailed
from marlaas_operator.uninstall import main as uninstall

from .conftest import CHART, Document, Helm

NAMESPACE = "marlaas-system"
OPERATOR = f"system:serviceaccount:{NAMESPACE}:marlaas-operator"
OURS = {"app.kubernetes.io/managed-by": "marlaas-operator"}
IN_FORCE_S = 30.0


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


@pytest.fixture(scope="module")
def release(control_plane: ControlPlane, helm: Helm) -> Iterator[Release]:
    release = Release(control_plane, helm)
    release.call("install", "marlaas", CHART, "--create-namespace")
    for namespace in ("team-a", "team-b"):
        control_plane.kubectl("create", "namespace", namespace)
    wait_for_admission(release)
    yield release
    release.call("uninstall", "marlaas", "--no-hooks")


def wait_for_admission(release: Release) -> None:
    """A new binding comes into force within seconds, not at once."""
    until = time.monotonic() + IN_FORCE_S
    for policy_name in ("own-objects", "locked-pods"):
        probe = secret("probe", {}) if policy_name == "own-objects" else deployment(automountServiceAccountToken=True)
        while policy_name not in release.refusal(
            OPERATOR, "create", "--dry-run=server", "-f", "-", stdin=json.dumps(probe)
        ):
            assert time.monotonic() < until, f"{policy_name} is not in force after {IN_FORCE_S:.0f} s"


def secret(name: str, labels: dict[str, str], namespace: str = "team-a") -> Document:
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"bus.creds": "x"}}


def deployment(**pod: object) -> Document:
    labels = {"app": "x"}
    container = {"name": "main", "image": "x", "securityContext": {"allowPrivilegeEscalation": False}}
    locked = {
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True},
        "containers": [container],
    }
    template = {"metadata": {"labels": labels}, "spec": {**locked, **pod}}
    metadata = {"name": "greedy-sandbox", "namespace": "team-a", "labels": OURS}
    spec = {"selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


def put(release: Release, body: Document) -> str:
    return release.refusal(OPERATOR, "apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(body))


def test_the_operator_makes_and_replaces_a_credential_of_its_own_without_reading_it(release: Release) -> None:
    own = secret("job-sandbox", OURS)
    assert put(release, own) == ""
    assert put(release, {**own, "stringData": {"bus.creds": "renewed"}}) == ""
    assert 'cannot get resource "secrets"' in release.refusal(OPERATOR, "-n", "team-a", "get", "secret", "job-sandbox")
    assert 'cannot list resource "secrets"' in release.refusal(OPERATOR, "get", "secrets", "--all-namespaces")


def test_the_operator_cannot_make_a_secret_that_does_not_say_whose_it_is(release: Release) -> None:
    assert "writes only objects labelled" in put(release, secret("anonymous", {}))


def test_the_operator_cannot_take_over_somebody_elses_secret_by_labelling_it(release: Release) -> None:
    release.plane.kubectl("apply", "-f", "-", stdin=json.dumps(secret("login", {"app": "web"})))
    assert "touches only objects labelled" in put(release, secret("login", OURS))
    assert "writes only objects labelled" in put(release, secret("login", {"app": "web"}))


def test_the_operator_cannot_touch_a_secret_beside_its_own_in_its_namespace(release: Release) -> None:
    release.plane.kubectl("apply", "-f", "-", stdin=json.dumps(secret("registry", {}, NAMESPACE)))
    assert "touches only objects labelled" in put(release, secret("registry", OURS, NAMESPACE))


def test_the_operator_cannot_delete_somebody_elses_secret(release: Release) -> None:
    release.plane.kubectl("apply", "-f", "-", stdin=json.dumps(secret("login", {"app": "web"})))
    raw = "/api/v1/namespaces/team-a/secrets/login"
    assert "touches only objects labelled" in release.refusal(OPERATOR, "delete", "--raw", raw)
    assert release.plane.kubectl("-n", "team-a", "get", "secret", "login", "-o", "name") == "secret/login\n"


def test_the_charts_own_objects_are_not_the_operators_to_change(release: Release) -> None:
    change = ("patch", "deployment", "marlaas-orchestrator", "--type=merge", "--patch", '{"spec": {"replicas": 0}}')
    assert "writes only objects labelled" in release.refusal(OPERATOR, "-n", NAMESPACE, *change)


def test_the_operator_may_make_locked_pods(release: Release) -> None:
    assert put(release, deployment()) == ""


def container(ports: list[Document] | None = None, **context: object) -> Document:
    """A container that breaks one rule."""
    locked = {"allowPrivilegeEscalation": False, **context}
    return {"name": "main", "image": "x", "securityContext": locked, "ports": ports or []}


def token_volume() -> Document:
    """What mounts a token of the pod's account whether or not one is to be mounted by itself."""
    return {"name": "token", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}


LOOSE: list[tuple[dict[str, object], str]] = [
    ({"automountServiceAccountToken": True}, "hold no API token"),
    ({"hostNetwork": True}, "use nothing of their node"),
    ({"hostPID": True}, "use nothing of their node"),
    ({"volumes": [{"name": "root", "hostPath": {"path": "/"}}]}, "use nothing of their node"),
    ({"volumes": [token_volume()]}, "hold no API token"),
    ({"volumes": [{"name": "disk", "nfs": {"server": "10.0.0.1", "path": "/"}}]}, "no volumes but Secrets"),
    ({"containers": [container(ports=[{"containerPort": 80, "hostPort": 80}])]}, "use nothing of their node"),
    ({"securityContext": {}}, "never root and gain no privilege"),
    ({"securityContext": {"runAsNonRoot": True, "runAsUser": 0}}, "never root and gain no privilege"),
    ({"containers": [container(runAsNonRoot=False, runAsUser=0)]}, "never root and gain no privilege"),
    ({"containers": [container(runAsNonRoot=False)]}, "never root and gain no privilege"),
    ({"containers": [container(capabilities={"add": ["NET_RAW"]})]}, "never root and gain no privilege"),
    ({"containers": [{"name": "main", "image": "x"}]}, "never root and gain no privilege"),
    (
        {"initContainers": [{"name": "first", "image": "x", "securityContext": {"privileged": True}}]},
        "gain no privilege",
    ),
]


@pytest.mark.parametrize(("pod", "sentence"), LOOSE, ids=[str(next(iter(pod))) for pod, _ in LOOSE])
def test_the_operator_can_make_no_other_pods(release: Release, pod: dict[str, object], sentence: str) -> None:
    assert sentence in put(release, deployment(**pod))


def test_the_operator_can_have_no_accounts_token_written_into_a_secret_of_its_own(release: Release) -> None:
    """The cluster fills a Secret of this type in; the answer to an empty patch would show it to whoever stole the operator's token."""
    body = secret("ghost-sandbox", OURS) | {"type": "kubernetes.io/service-account-token"}
    body["metadata"]["annotations"] = {"kubernetes.io/service-account.name": "default"}
    assert "only Secrets of type Opaque" in put(release, body)


@pytest.mark.parametrize("namespace", ["kube-system", "kube-public"])
def test_the_operator_makes_nothing_in_the_clusters_own_namespaces(release: Release, namespace: str) -> None:
    """A pod there could mount the Secrets that lie there."""
    pod = deployment()
    pod["metadata"]["namespace"] = namespace
    for body in (pod, secret("own-sandbox", OURS, namespace)):
        assert "namespaces of Kubernetes itself" in put(release, body)


def test_others_are_not_bothered_by_these_policies(release: Release) -> None:
    release.plane.kubectl("apply", "-f", "-", stdin=json.dumps(secret("others", {})))
    loose = {**deployment(automountServiceAccountToken=True), "metadata": {"name": "web", "namespace": "team-a"}}
    release.plane.kubectl("apply", "-f", "-", stdin=json.dumps(loose))


def can(release: Release, user: str, verb: str, what: str, namespace: str) -> bool:
    resource, _, part = what.partition("/")
    return release.refusal(user, "auth", "can-i", verb, resource, f"--subresource={part}", "-n", namespace) == ""


def rljob(name: str, namespace: str) -> Document:
    spec = {
        "poolRef": {"name": "tiny"},
        "agents": [{"name": "policy", "adapter": {"rank": 8, "alpha": 16}}],
        "environment": {"name": "reverse"},
        "training": {"steps": 1},
    }
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "marlaas.dev/v1alpha1", "kind": "RLJob", "metadata": metadata, "spec": spec}


def wait_for_aggregation(release: Release, user: str) -> None:
    until = time.monotonic() + IN_FORCE_S
    while not can(release, user, "create", "rljobs.marlaas.dev", "team-a"):
        assert time.monotonic() < until, "edit never learnt of RLJobs"


def test_an_editor_of_one_namespace_makes_jobs_there_and_nothing_elsewhere(control_plane_with_roles: Release) -> None:
    release = control_plane_with_roles
    release.kubectl_as("ada", "create", "-f", "-", stdin=json.dumps(rljob("mine", "team-a")))
    assert "forbidden" in release.refusal("ada", "create", "-f", "-", stdin=json.dumps(rljob("theirs", "team-b")))
    assert can(release, "ada", "get", "modelpools.marlaas.dev", "team-a")
    for what in ("modelpools.marlaas.dev", "tenants.marlaas.dev", "rljobs.marlaas.dev/status"):
        assert not can(release, "ada", "patch", what, "team-a")


@pytest.fixture(scope="module")
def control_plane_with_roles(control_plane_with_controllers: ControlPlane, helm: Helm) -> Release:
    """Aggregation of ClusterRoles, like the collection of what is owned, is the controllers' work."""
    plane = control_plane_with_controllers
    release = Release(plane, helm)
    release.call("install", "marlaas", CHART, "--create-namespace")
    for namespace in ("team-a", "team-b"):
        plane.kubectl("create", "namespace", namespace)
    plane.kubectl("-n", "team-a", "create", "rolebinding", "ada", "--clusterrole=edit", "--user=ada")
    wait_for_aggregation(release, "ada")
    return release


def pod(name: str, labels: dict[str, str]) -> Document:
    metadata = {"name": name, "namespace": "team-a", "labels": labels}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": [{"name": "main", "image": "x"}]},
    }


def test_a_tenant_cannot_pass_a_pod_off_as_the_operators(control_plane_with_roles: Release) -> None:
    release = control_plane_with_roles
    reserved = "managed-by=marlaas-operator is the MARLaaS operator's"
    until = time.monotonic() + IN_FORCE_S
    forged = pod("forged", {**OURS, "marlaas.dev/pool": "tiny"})
    while reserved not in release.refusal("ada", "create", "--dry-run=server", "-f", "-", stdin=json.dumps(forged)):
        assert time.monotonic() < until, "the policy is not in force"
    release.kubectl_as("ada", "create", "-f", "-", stdin=json.dumps(pod("plain", {"app": "web"})))
    assert reserved in release.refusal(
        "ada", "-n", "team-a", "label", "pod", "plain", "app.kubernetes.io/managed-by=marlaas-operator"
    )
    release.kubectl_as("ada", "-n", "team-a", "label", "pod", "plain", "app=changed", "--overwrite")


@pytest.mark.parametrize("kind", ["Deployment", "ReplicaSet", "DaemonSet", "Job", "CronJob"])
def test_a_tenant_cannot_have_a_controller_make_such_a_pod(control_plane_with_roles: Release, kind: str) -> None:
    forged = pod("forged", {**OURS, "app": "x", "marlaas.dev/pool": "tiny"})
    forged["spec"]["restartPolicy"] = "OnFailure" if "Job" in kind else "Always"
    template = {"metadata": {"labels": forged["metadata"]["labels"]}, "spec": forged["spec"]}
    spec: Document = {"template": template} | ({} if "Job" in kind else {"selector": {"matchLabels": {"app": "x"}}})
    if kind == "CronJob":
        spec = {"schedule": "* * * * *", "jobTemplate": {"spec": spec}}
    group = "batch/v1" if "Job" in kind else "apps/v1"
    made = {"apiVersion": group, "kind": kind, "metadata": {"name": "forged", "namespace": "team-a"}, "spec": spec}
    said = control_plane_with_roles.refusal("ada", "create", "--dry-run=server", "-f", "-", stdin=json.dumps(made))
    assert "managed-by=marlaas-operator is the MARLaaS operator's" in said


def test_the_controllers_copy_the_operators_label_to_its_pods(control_plane_with_roles: Release) -> None:
    plane = control_plane_with_roles.plane
    made = deployment()
    made["spec"]["template"]["metadata"]["labels"] |= OURS
    assert put(control_plane_with_roles, made) == ""
    until = time.monotonic() + IN_FORCE_S
    while not plane.kubectl(
        "-n", "team-a", "get", "pods", "-l", "app=x,app.kubernetes.io/managed-by=marlaas-operator", "-o", "name"
    ):
        assert time.monotonic() < until, plane.kubectl("-n", "team-a", "get", "events")
    plane.kubectl("-n", "team-a", "delete", "deployment", "greedy-sandbox")


def test_an_upgrade_leaves_the_bus_alone_and_restarts_the_operator_when_it_must(
    control_plane_with_roles: Release,
) -> None:
    release = control_plane_with_roles

    def template(kind: str, name: str) -> object:
        return json.loads(release.plane.kubectl("-n", NAMESPACE, "get", kind, name, "-o", "json"))["spec"]["template"]

    bus, operator = template("statefulset", "marlaas-nats"), template("deployment", "marlaas-operator")
    release.call("upgrade", "marlaas", CHART, "--set", "logLevel=DEBUG")
    assert template("statefulset", "marlaas-nats") == bus
    assert template("deployment", "marlaas-operator") != operator


def test_uninstalling_leaves_the_kinds_and_their_objects_and_no_finalizer(
    control_plane_with_roles: Release, tmp_path: Path
) -> None:
    release = control_plane_with_roles
    plane = release.plane
    held = rljob("held", "team-a")
    held["metadata"]["finalizers"] = ["marlaas.dev/job", "example.com/theirs"]
    sandbox = {**deployment(), "metadata": {"name": "held-sandbox", "namespace": "team-a", "labels": OURS}}
    credential = secret("held-sandbox", OURS)
    for body in (held, sandbox, credential):
        plane.kubectl("apply", "-f", "-", stdin=json.dumps(body))

    clean_up_as_the_hook_would(release, tmp_path)
    release.call("uninstall", "marlaas", "--no-hooks", "--wait")

    kept = json.loads(plane.kubectl("-n", "team-a", "get", "rljob", "held", "-o", "json"))
    assert kept["metadata"]["finalizers"] == ["example.com/theirs"]
    assert plane.kubectl("-n", "team-a", "get", "deployments,secrets,networkpolicies,rolebindings", "-o", "name") == (
        "rolebinding.rbac.authorization.k8s.io/ada\n"
    )
    assert left_of_the_release(plane) == []


def clean_up_as_the_hook_would(release: Release, folder: Path) -> None:
    """With the hook's own account: helm makes its rights, and the Job that uses them cannot run without a node."""
    plane = release.plane
    hooks = [each for each in yaml.safe_load_all(release.call("get", "hooks", "marlaas")) if each]
    rights = [
        each for each in hooks if each["metadata"]["name"].startswith("marlaas-uninstall") and each["kind"] != "Job"
    ]
    plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(rights))
    told = json.loads(plane.kubectl("-n", NAMESPACE, "get", "configmap", "marlaas-installation", "-o", "json"))
    file = folder / "installation.yaml"
    file.write_text(told["data"]["installation.yaml"])
    account = plane.user_kubeconfig(f"system:serviceaccount:{NAMESPACE}:marlaas-uninstall", ["system:serviceaccounts"])
    assert uninstall(["--installation", str(file), "--kubeconfig", str(account)]) == 0
    replicas = plane.kubectl(
        "-n", NAMESPACE, "get", "deployment", "marlaas-operator", "-o", "jsonpath={.spec.replicas}"
    )
    assert replicas == "0"
    plane.kubectl("delete", "-f", "-", stdin=yaml.safe_dump_all(rights))


def left_of_the_release(plane: ControlPlane) -> list[str]:
    kinds = plane.kubectl("api-resources", "--verbs=list", "-o", "name").split()
    listed = [kind for kind in kinds if not kind.startswith(("events", "leases", "endpointslices"))]
    found = plane.kubectl(
        "get", ",".join(listed), "--all-namespaces", "-l", "app.kubernetes.io/name=marlaas", "-o", "name"
    )
    return [name for name in found.split() if "customresourcedefinition" not in name]
