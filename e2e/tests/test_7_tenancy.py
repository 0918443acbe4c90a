"""An editor of one namespace: jobs there, nothing elsewhere, and no pod with more privilege than the pool allows."""

import contextlib
import copy
import json

import pytest

from marlaas_e2e.api import Object
from marlaas_e2e.kubectl import CommandFailed
from marlaas_e2e.platform import Platform, manifest

HOME, ELSEWHERE, EDITOR = "team-g", "team-h", "ed"
BINDING: Object = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "RoleBinding",
    "metadata": {"name": "ed-edits", "namespace": HOME},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"},
    "subjects": [{"kind": "User", "name": EDITOR, "apiGroup": "rbac.authorization.k8s.io"}],
}


@pytest.fixture(scope="module")
def editor(platform: Platform) -> None:
    """Two namespaces, and a person who edits one of them."""
    platform.tenant(HOME)
    platform.tenant(ELSEWHERE)
    platform.apply(BINDING)

    def bound() -> bool:
        with contextlib.suppress(CommandFailed):
            return bool(platform.kubectl("--as", EDITOR, "auth", "can-i", "create", "rljobs", "-n", HOME))
        return False

    platform.until(bound, "the editor may edit", 60)


def apply_as_editor(platform: Platform, body: Object) -> str:
    """What the API server says to the editor; a dry run."""
    words = ("--as", EDITOR, "create", "--dry-run=server", "-f", "-")
    return platform.kubectl(*words, stdin=json.dumps(body))


def job(namespace: str, **environment: object) -> Object:
    (body,) = copy.deepcopy(manifest("endless"))
    body["metadata"] = {"name": "mine", "namespace": namespace}
    body["spec"]["environment"] |= environment
    return body


@pytest.mark.usefixtures("editor")
def test_an_editor_creates_jobs_at_home_and_nowhere_else(platform: Platform) -> None:
    assert "created" in apply_as_editor(platform, job(HOME))
    with pytest.raises(CommandFailed, match="forbidden"):
        apply_as_editor(platform, job(ELSEWHERE))


@pytest.mark.usefixtures("editor")
@pytest.mark.parametrize(
    "verb", ["create modelpools", "delete modelpools", "create tenants", "update rljobs --subresource=status"]
)
def test_what_is_the_platforms_is_not_the_editors(platform: Platform, verb: str) -> None:
    with pytest.raises(CommandFailed, match="no"):
        platform.kubectl("--as", EDITOR, "auth", "can-i", *verb.split(), "-n", HOME)


@pytest.mark.usefixtures("editor")
@pytest.mark.parametrize(
    "field",
    [
        {"serviceAccountName": "default"},
        {"hostPath": "/"},
        {"nodeSelector": {"kubernetes.io/hostname": "node1"}},
        {"labels": {"app.kubernetes.io/component": "trainer"}},
        {"securityContext": {"runAsUser": 0}},
        {"runtimeClassName": "runc"},
    ],
    ids=lambda field: next(iter(field)),
)
def test_a_job_has_no_field_for_privilege(platform: Platform, field: Object) -> None:
    with pytest.raises(CommandFailed, match="unknown field"):
        apply_as_editor(platform, job(HOME, **field))
