"""What a real API server makes of our manifests: it takes them, gives them back as we recognise them, and its own Pod Security admission lets their pods
through at the restricted level."""

from collections.abc import Iterator

import pytest
import yaml
from tests.operator.manifests.cases import CASES, manifests
from tests.tables import data

from marlaas_e2e.control_plane import ControlPlane
from marlaas_operator.cluster.api_server import connect
from marlaas_operator.cluster.resources import target_of
from marlaas_operator.plan import Manifest
from marlaas_operator.policies.child_reconcile import differs

HERE = "golden"
AROUND = data(__file__, "around")


@pytest.fixture(scope="module")
def server(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """With a namespace at the restricted level, and the classes that the golden cases name; other tests share the server."""
    control_plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(AROUND))
    yield control_plane
    made = [manifest for case in CASES for manifest in moved(case)]
    control_plane.kubectl("delete", "--ignore-not-found", "--wait=false", "-f", "-", stdin=yaml.safe_dump_all(made))


def moved(case: str) -> list[Manifest]:
    return [{**made, "metadata": {**made["metadata"], "namespace": HERE}} for made in manifests(case)]


@pytest.mark.parametrize("case", CASES)
async def test_what_was_applied_is_no_drift_when_it_is_read_again(server, case):
    gateway = await connect(server.kubeconfig)
    try:
        for manifest in moved(case):
            await gateway.apply(manifest)
            if manifest["kind"] != "Secret":
                assert not differs(manifest, await gateway.get(target_of(manifest))), manifest["kind"]
    finally:
        await gateway.close()


def created(server: ControlPlane, name: str, spec: Manifest) -> str:
    """What the server says of a pod that it is asked to take and forget."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": HERE}, "spec": spec}
    return server.kubectl("create", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(pod))


@pytest.mark.parametrize("case", CASES)
def test_pod_security_admission_lets_every_pod_through(server, case):
    templates = [made["spec"]["template"]["spec"] for made in moved(case) if "template" in made.get("spec", {})]
    for spec in templates:
        assert "created" in created(server, case, {**spec, "serviceAccountName": "default"})


def test_pod_security_admission_is_on(server):
    bare = {"containers": [{"name": "a", "image": "b"}]}
    with pytest.raises(Exception, match="violates PodSecurity"):
        created(server, "bare", bare)
