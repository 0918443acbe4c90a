"""The release on a real API server with controllers: tenants held to their own, upgraded, uninstalled without a trace but for the data.

Pods do not run here (there is no node): what they do is in e2e/.
"""

import json

import pytest
from tests.operator.objects import body, job

from marlaas_e2e.control_plane import ControlPlane

from .conftest import CHART, Document, Helm
from .releases import OURS, Release, wait_for_admission, wait_until

FORGED = {**OURS, "marlaas.dev/pool": "tiny"}
RESERVED = "managed-by=marlaas-operator is reserved for the MARLaaS operator"


def can(release: Release, user: str, verb: str, what: str, namespace: str) -> bool:
    resource, _, part = what.partition("/")
    return release.refusal(user, "auth", "can-i", verb, resource, f"--subresource={part}", "-n", namespace) == ""


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
    # `edit` gets `rljobs` straight from the chart's role, but `modelpools` only by way of `view`, so that comes later
    for right in (("create", "rljobs.marlaas.dev"), ("get", "modelpools.marlaas.dev")):
        wait_until(lambda right=right: can(release, "ada", *right, "team-a"), f"edit may {right}")
    wait_until(lambda: RESERVED in forging(release, pod("forged", FORGED)), "the policy is in force")
    return release


def pod(name: str, labels: dict[str, str]) -> Document:
    return body("v1", "Pod", "team-a", name, labels=labels) | {"spec": {"containers": [{"name": "main", "image": "x"}]}}


def forging(release: Release, made: Document) -> str:
    """The answer to a tenant's user who makes an object, which a dry run does not."""
    return release.refusal("ada", "create", "--dry-run=server", "-f", "-", stdin=json.dumps(made))


def test_a_tenant_cannot_pass_a_pod_off_as_the_operators(control_plane_with_roles):
    release = control_plane_with_roles
    assert RESERVED in forging(release, pod("forged", FORGED))
    release.kubectl_as("ada", "create", "-f", "-", stdin=json.dumps(pod("plain", {"app": "web"})))
    label = "app.kubernetes.io/managed-by=marlaas-operator"
    assert RESERVED in release.refusal("ada", "-n", "team-a", "label", "pod", "plain", label)
    release.kubectl_as("ada", "-n", "team-a", "label", "pod", "plain", "app=changed", "--overwrite")


@pytest.mark.parametrize("kind", ["Deployment", "ReplicaSet", "DaemonSet", "Job", "CronJob"])
def test_a_tenant_cannot_have_a_controller_make_such_a_pod(control_plane_with_roles, kind):
    forged = pod("forged", {**FORGED, "app": "x"})
    forged["spec"]["restartPolicy"] = "OnFailure" if "Job" in kind else "Always"
    template = {"metadata": {"labels": forged["metadata"]["labels"]}, "spec": forged["spec"]}
    spec: Document = {"template": template} | ({} if "Job" in kind else {"selector": {"matchLabels": {"app": "x"}}})
    if kind == "CronJob":
        spec = {"schedule": "* * * * *", "jobTemplate": {"spec": spec}}
    group = "batch/v1" if "Job" in kind else "apps/v1"
    assert RESERVED in forging(control_plane_with_roles, body(group, kind, "team-a", "forged") | {"spec": spec})
