"""No upgrade and no uninstallation deletes data: the claims of adapters and bus, and the kinds with every object, outlive the release. On a real API server.

Pods do not run here: that the files themselves are still there is in e2e/.
"""

import json
import shlex
from collections.abc import Iterator

import pytest
import yaml

from marlaas_e2e.control_plane import ControlPlane

from .conftest import CHART, Document, Helm
from .releases import NAMESPACE, Release, wait_until

BLOBS, BUS, STATEFULSET = "marlaas-blobs", "data-marlaas-nats-0", "marlaas-nats"
OBJECT_STORE = "blobs.url=s3://bucket/marlaas"
OTHER_CLAIM = "blobs.persistentVolumeClaim.existing=other"
EXTERNAL_BUS = "nats.external.url=tls://bus.example.com,nats.external.credsSecret=bus,nats.external.cidrs={10.0.0.0/8}"
NO_KINDS = "crds.install=false"
ELSEWHERE = (OBJECT_STORE, EXTERNAL_BUS, NO_KINDS)
KIND = "rljobs.marlaas.dev"
SELECTOR = "app.kubernetes.io/name=marlaas,app.kubernetes.io/instance=marlaas"
DELETE_DATA = ("delete", "persistentvolumeclaims", "--selector", SELECTOR)
"""What docs/how-to/uninstall.md has people run; a scenario checks that it deletes the data."""


def get(release: Release, kind: str, name: str) -> Document:
    text = release.plane.kubectl("-n", NAMESPACE, "get", kind, name, "--ignore-not-found", "-o", "json")
    return json.loads(text) if text.strip() else {}


def claims(release: Release) -> dict[str, str]:
    """Uid of each claim in the release's namespace that is not on its way out, by name."""
    listed = json.loads(release.plane.kubectl("-n", NAMESPACE, "get", "persistentvolumeclaims", "-o", "json"))["items"]
    metadata = [each["metadata"] for each in listed]
    return {each["name"]: each["uid"] for each in metadata if "deletionTimestamp" not in each}


def owners(release: Release, claim: str) -> list[str]:
    return [owner["kind"] for owner in get(release, "pvc", claim)["metadata"].get("ownerReferences", [])]


def words(*settings: str) -> tuple[str, ...]:
    """Words of an upgrade to the defaults and these settings: without --reset-values, helm would keep those of before."""
    given = [word for setting in settings for word in ("--set", setting)]
    return ("upgrade", "--install", "marlaas", str(CHART), "--create-namespace", "--reset-values", *given)


def refusal(release: Release, setting: str) -> str:
    """What helm says of an upgrade that it does not make."""
    done = release.helm("--kubeconfig", release.plane.kubeconfig, "--namespace", NAMESPACE, *words(setting))
    assert done.returncode != 0, setting
    return done.stderr


@pytest.fixture(scope="module")
def installed(control_plane_with_controllers: ControlPlane, helm: Helm) -> Iterator[Release]:
    release = Release(control_plane_with_controllers, helm)
    yield release
    release.call("uninstall", "marlaas", "--no-hooks", "--ignore-not-found", "--wait")
    release.plane.kubectl("-n", NAMESPACE, *DELETE_DATA)


@pytest.fixture
def release(installed: Release) -> Release:
    """The chart under its defaults, with the claims of adapters and bus, which the controllers make."""
    installed.call(*words())
    wait_until(lambda: {BLOBS, BUS} <= claims(installed).keys())
    return installed


def test_an_upgrade_that_puts_everything_elsewhere_keeps_the_data_and_a_rollback_takes_it_up(release):
    before, kind = claims(release), get(release, "crd", KIND)["metadata"]["uid"]
    release.call(*words(*ELSEWHERE))
    kinds = {body["kind"] for body in yaml.safe_load_all(release.call("get", "manifest", "marlaas")) if body}
    assert not kinds & {"PersistentVolumeClaim", "CustomResourceDefinition", "StatefulSet"}
    wait_until(lambda: not get(release, "statefulset", STATEFULSET))
    assert (claims(release), owners(release, BUS)) == (before, [])
    release.call("rollback", "marlaas")
    assert claims(release) == before
    assert get(release, "crd", KIND)["metadata"]["uid"] == kind


def test_uninstalling_keeps_the_claims_and_says_so_and_installing_again_takes_them_up(release):
    before = claims(release)
    said = release.call("uninstall", "marlaas", "--no-hooks", "--wait")
    assert f"[PersistentVolumeClaim] {BLOBS}" in said
    assert (claims(release), owners(release, BUS)) == (before, [])
    release.call(*words())
    assert claims(release) == before


def as_an_older_chart_left_it(release: Release) -> None:
    """Helm keeps an object that leaves the release if the live object says so. What an older chart installed does not, and its bus's claim goes along."""
    for kind, name in (("pvc", BLOBS), ("crd", KIND)):
        release.plane.kubectl("-n", NAMESPACE, "annotate", kind, name, "helm.sh/resource-policy-")
    policy = {"spec": {"persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete"}}}
    patch = ("patch", "statefulset", STATEFULSET, "--type", "merge", "--patch", json.dumps(policy))
    release.plane.kubectl("-n", NAMESPACE, *patch, "--field-manager", "helm")
    wait_until(lambda: owners(release, BUS) != [])


def test_what_an_older_chart_installed_is_deleted_by_no_upgrade_and_kept_once_it_is_marked(release):
    before = claims(release)
    as_an_older_chart_left_it(release)
    assert f"would delete the claim {BLOBS}" in refusal(release, OTHER_CLAIM)
    for setting, data in ((OBJECT_STORE, f"claim {BLOBS}"), (EXTERNAL_BUS, f"claim {BUS}"), (NO_KINDS, f"kind {KIND}")):
        said = refusal(release, setting)
        assert f"would delete the {data}" in said
        release.plane.kubectl(*shlex.split(said.partition("then upgrade: kubectl ")[2]))
    wait_until(lambda: owners(release, BUS) == [])
    release.call(*words(*ELSEWHERE))
    assert claims(release) == before
    assert get(release, "crd", KIND)
