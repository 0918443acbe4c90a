"""An editor of one namespace: jobs there, and nothing elsewhere. tests/chart/test_installed.py and tests/crds have the rights and fields in detail."""

import contextlib
import json

import pytest

from marlaas_e2e.api import Object
from marlaas_e2e.kubectl import CommandFailed
from marlaas_e2e.platform import Platform, endless, tenant

HOME, ELSEWHERE, EDITOR = "team-g", "team-h", "ed"
GROUP = "rbac.authorization.k8s.io"
BINDING: Object = {
    "apiVersion": f"{GROUP}/v1",
    "kind": "RoleBinding",
    "metadata": {"name": "ed-edits", "namespace": HOME},
    "roleRef": {"apiGroup": GROUP, "kind": "ClusterRole", "name": "edit"},
    "subjects": [{"kind": "User", "name": EDITOR, "apiGroup": GROUP}],
}
NOT_THE_EDITORS = ("create modelpools", "delete modelpools", "create tenants", "update rljobs --subresource=status")


def begin(_: Platform) -> list[Object]:
    return [*tenant(HOME), *tenant(ELSEWHERE), BINDING]


def create(platform: Platform, body: Object) -> str:
    """What the API server answers the editor; a dry run."""
    return platform.kubectl("--as", EDITOR, "create", "--dry-run=server", "-f", "-", stdin=json.dumps(body))


def may(platform: Platform, words: str) -> bool:
    with contextlib.suppress(CommandFailed):
        return bool(platform.kubectl("--as", EDITOR, "auth", "can-i", *words.split(), "-n", HOME))
    return False


def test_an_editor_creates_jobs_at_home_and_nowhere_else(platform: Platform) -> None:
    platform.until(lambda: may(platform, "create rljobs"), "the editor may edit")
    assert "created" in create(platform, endless("mine", HOME))
    with pytest.raises(CommandFailed, match="forbidden"):
        create(platform, endless("mine", ELSEWHERE))
    with pytest.raises(CommandFailed, match="unknown field"):
        create(platform, endless("mine", HOME, environment={"name": "reverse", "securityContext": {"runAsUser": 0}}))
    assert not [words for words in NOT_THE_EDITORS if may(platform, words)]
