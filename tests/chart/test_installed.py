"""The release on a real API server with controllers: tenants held to their own, upgraded, uninstalled without a trace but for the data.

Pods do not run here (there is no node): what they do is in e2e/.
"""

import json

import pytest
from tests.operator.objects import job

from marlaas_e2e.control_plane import ControlPlane

from .conftest import CHART, Document, Helm
from .releases import OURS, Release, wait_for_admission, wait_until

RESERVED = "managed-by=marlaas-operator is reserved for the MARLaaS operator"


def can(release: Release, user: str, verb: str, what: str, namespace: str) -> bool:
    resource, _, part = what.partition("/")
    return release.refusal(user, "auth", "can-i", verb, resource, f"--subresource={part}", "-n", namespace) == ""


def wait_for_aggregation(release: Release, user: str) -> None:
    """`edit` gets `rljobs` straight from the chart's role, but `modelpools` only by way of `view`, so that comes later."""
    for verb, what in (("create", "rljobs.marlaas.dev"), ("get", "modelpools.marlaas.dev")):
        wait_until(lambda right=(verb, what): can(release, user, *right, "team-a"), f"edit may {verb} {what}")


def wait_for_the_reserved_label(release: Release, user: str) -> None:
    forged = json.dumps(pod("forged", {**OURS, "marlaas.dev/pool": "tiny"}))
    words = ("create", "--dry-run=server", "-f", "-")
    wait_until(lambda: RESERVED in release.refusal(user, *words, stdin=forged), "the policy is in force")


def test_an_editor_of_one_namespace_makes_jobs_there_and_nothing_elsewhere(control_plane_with_roles):
    release = control_plane_with_roles
    release.kubectl_as("ada", "create", "-f", "-", stdin=json.dumps(job("team-a", "mine", "tiny")))
    assert "forbidden" in release.refusal("ada", "create", "-f", "-", stdin=json.dumps(job("team-b", "theirs", "tiny")))
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
    wait_for_admission(release)
    wait_for_aggregation(release, "ada")
    wait_for_the_reserved_label(release, "ada")
    return release


def pod(name: str, labels: dict[str, str]) -> Document:
    metadata = {"name": name, "namespace": "team-a", "labels": labels}
    spec = {"containers": [{"name": "main", "image": "x"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def test_a_tenant_cannot_pass_a_pod_off_as_the_operators(control_plane_with_roles):
    release = control_plane_with_roles
    forged = pod("forged", {**OURS, "marlaas.dev/pool": "tiny"})
    assert RESERVED in release.refusal("ada", "create", "--dry-run=server", "-f", "-", stdin=json.dumps(forged))
    release.kubectl_as("ada", "create", "-f", "-", stdin=json.dumps(pod("plain", {"app": "web"})))
    label = "app.kubernetes.io/managed-by=marlaas-operator"
    assert RESERVED in release.refusal("ada", "-n", "team-a", "label", "pod", "plain", label)
    release.kubectl_as("ada", "-n", "team-a", "label", "pod", "plain", "app=changed", "--overwrite")


@pytest.mark.parametrize("kind", ["Deployment", "ReplicaSet", "DaemonSet", "Job", "CronJob"])
def test_a_tenant_cannot_have_a_controller_make_such_a_pod(control_plane_with_roles, kind):
    forged = pod("forged", {**OURS, "app": "x", "marlaas.dev/pool": "tiny"})
    forged["spec"]["restartPolicy"] = "OnFailure" if "Job" in kind else "Always"
    template = {"metadata": {"labels": forged["metadata"]["labels"]}, "spec": forged["spec"]}
    spec: Document = {"template": template} | ({} if "Job" in kind else {"selector": {"matchLabels": {"app": "x"}}})
    if kind == "CronJob":
        spec = {"schedule": "* * * * *", "jobTemplate": {"spec": spec}}
    group = "batch/v1" if "Job" in kind else "apps/v1"
    made = {"apiVersion": group, "kind": kind, "metadata": {"name": "forged", "namespace": "team-a"}, "spec": spec}
    said = control_plane_with_roles.refusal("ada", "create", "--dry-run=server", "-f", "-", stdin=json.dumps(made))
    assert RESERVED in said
