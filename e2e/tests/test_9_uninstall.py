"""Upgrading keeps everything going and every file; uninstalling leaves the kinds, their objects and the data; a release of the same name goes on with them."""

from collections.abc import Iterator

import pytest

from marlaas_e2e.api import Object
from marlaas_e2e.elsewhere import Elsewhere
from marlaas_e2e.platform import NAMESPACE, RELEASE, ROOT, Platform, manifest

TEAM = "team-m"
OURS = ("app.kubernetes.io/name=marlaas", "app.kubernetes.io/managed-by=marlaas-operator")
OF_THE_TESTS = {"kube-root-ca.crt", "default", "python-environment", "model-cache"}
"""What is in the release's namespace without the release: Kubernetes' own, and the volumes of these tests."""
KEPT = {f"{RELEASE}-blobs", f"data-{RELEASE}-nats-0"}
"""The claims of adapters and bus."""
DELETE_DATA = (
    "persistentvolumeclaims",
    "--selector",
    f"app.kubernetes.io/name=marlaas,app.kubernetes.io/instance={RELEASE}",
)
"""What docs/how-to/uninstall.md has people delete."""
FILE, WORDS = "kept-by-the-test", "an adapter's bytes"
RESTRICTED: Object = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.fixture(scope="module")
def jobs(platform: Platform) -> Iterator[None]:
    """A job that runs and one that is suspended, and a file on the volume of the adapters."""
    platform.tiny_pool()
    platform.tenant(TEAM)
    (body,) = manifest("endless")
    body["metadata"]["namespace"] = TEAM
    paused = {**body, "metadata": {"name": "paused", "namespace": TEAM}, "spec": {**body["spec"], "suspend": True}}
    platform.apply(body, paused)
    platform.until(lambda: step(platform), "a job runs", 300)
    platform.until(lambda: is_suspended(platform), "the other one is suspended", 180)
    write = f"import pathlib; pathlib.Path('/var/lib/marlaas/blobs/{FILE}').write_text({WORDS!r})"
    platform.kubectl("exec", "-n", NAMESPACE, "tiny-trainer-0", "-c", "trainer", "--", "python3", "-c", write)
    yield
    platform.kubectl("delete", "rljobs", "--all", "-A", "--timeout=60s")
    platform.kubectl("delete", "modelpools", "--all", "--timeout=60s")


def step(platform: Platform) -> int:
    return int(platform.status("rljob", "endless", TEAM).get("step") or 0)


def is_suspended(platform: Platform) -> bool:
    return platform.status("rljob", "paused", TEAM).get("phase") == "Suspended"


def claims(platform: Platform) -> dict[str, str]:
    """Uid of each claim of the release that is not on its way out."""
    metadata = [each["metadata"] for each in platform.cluster.get("persistentvolumeclaims", "-n", NAMESPACE)["items"]]
    return {each["name"]: each["uid"] for each in metadata if each["name"] in KEPT and "deletionTimestamp" not in each}


def uninstall(platform: Platform) -> None:
    platform.cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--timeout", "3m")
    platform.until(lambda: not left(platform), "nothing of the release is left", 300)


def test_an_upgrade_with_another_value_takes_effect_and_keeps_the_pool(platform: Platform) -> None:
    platform.tiny_pool()
    before = platform.get("pod", "tiny-rollout-0", NAMESPACE)["metadata"]["uid"]
    platform.install("--set", "logLevel=DEBUG")
    assert platform.get("configmap", f"{RELEASE}-installation", NAMESPACE)["data"]["installation.yaml"].count("DEBUG")
    assert platform.get("pod", "tiny-rollout-0", NAMESPACE)["metadata"]["uid"] == before


@pytest.mark.usefixtures("jobs")
def test_uninstalling_leaves_the_kinds_their_objects_and_the_data_only(platform: Platform) -> None:
    before, marked = claims(platform), histories(platform)
    assert before.keys() == KEPT
    uninstall(platform)
    assert histories(platform) == marked
    kept = [platform.get("rljob", name, TEAM) for name in ("endless", "paused")]
    assert step(platform) > 0
    assert not any("finalizers" in each["metadata"] for each in kept)
    assert is_suspended(platform)
    assert platform.get("modelpool", "tiny")
    assert claims(platform) == before


@pytest.mark.usefixtures("jobs")
def test_a_release_of_the_same_name_takes_the_data_up_and_the_job_goes_on(platform: Platform) -> None:
    before, reached = claims(platform), step(platform)
    platform.install()
    platform.pool_ready("tiny")
    platform.until(lambda: step(platform) > reached, f"steps after {reached}, where the job was", 300)
    assert claims(platform) == before


@pytest.mark.usefixtures("jobs")
def test_an_upgrade_to_an_object_store_and_an_uninstallation_keep_every_file_of_the_adapters(
    platform: Platform,
) -> None:
    """The upgrade does not wait for pods: there is no such store."""
    before = claims(platform)
    words = ("upgrade", RELEASE, ROOT / "charts" / "marlaas", "--namespace", NAMESPACE, "--reuse-values")
    platform.cluster.helm(*words, "--set", "blobs.url=s3://bucket/marlaas")
    told = platform.get("configmap", f"{RELEASE}-installation", NAMESPACE)["data"]["installation.yaml"]
    assert "s3://bucket/marlaas" in told
    assert claims(platform) == before
    uninstall(platform)
    assert claims(platform) == before
    assert read(platform, f"{RELEASE}-blobs", FILE) == WORDS


@pytest.mark.usefixtures("jobs")
def test_the_documented_command_deletes_the_data(platform: Platform) -> None:
    platform.cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--ignore-not-found", "--wait")
    platform.kubectl("delete", *DELETE_DATA, "-n", NAMESPACE, "--timeout=60s")
    assert claims(platform) == {}
    platform.until(lambda: not volumes(platform), "the volumes are gone with their claims")


def volumes(platform: Platform) -> list[str]:
    """Claims of the release that a volume still belongs to."""
    owners = [each["spec"].get("claimRef") or {} for each in platform.cluster.get("persistentvolumes")["items"]]
    return [owner["name"] for owner in owners if owner.get("namespace") == NAMESPACE and owner["name"] in KEPT]


def read(platform: Platform, claim: str, file: str) -> str:
    """Content of a file on a claim's volume, by a pod of our own."""
    container = {
        "name": "reader",
        "image": Elsewhere.said().image("operator"),
        "imagePullPolicy": "IfNotPresent",
        "command": ["cat", f"/data/{file}"],
        "securityContext": RESTRICTED,
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "fsGroup": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}],
    }  # fmt: skip
    metadata = {"name": "reader", "namespace": NAMESPACE}
    platform.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    ended = lambda: platform.status("pod", "reader", NAMESPACE).get("phase") in ("Succeeded", "Failed")  # noqa: E731
    platform.until(ended, "the file is read")
    text = platform.kubectl("logs", "-n", NAMESPACE, "reader")
    platform.kubectl("delete", "pod", "reader", "-n", NAMESPACE, "--timeout=60s")
    return text


def histories(platform: Platform) -> list[str]:
    """The ConfigMaps with the usage histories of Tenants, as `configmap/<name>`."""
    return platform.kubectl("get", "configmaps", "-n", NAMESPACE, "-l", "marlaas.dev/tenant", "-o", "name").split()


def left(platform: Platform) -> list[str]:
    """Every object, of any kind in any namespace, that says that it is of MARLaaS, and whatever is left in the release's namespace; but for the data."""
    everywhere, namespaced = kinds(platform, "true", "false"), kinds(platform, "true")
    found = [platform.kubectl("get", everywhere, "-A", "-l", selector, "-o", "name").split() for selector in OURS]
    here = [name for name in platform.names(namespaced, NAMESPACE) if name.rpartition("/")[2] not in OF_THE_TESTS]
    data = ("customresourcedefinition", *(f"persistentvolumeclaim/{claim}" for claim in KEPT), *histories(platform))
    return [name for names in (*found, here) for name in names if not name.startswith(data)]


def kinds(platform: Platform, *namespaced: str) -> str:
    """Every kind that can be listed, but for ours and for what Kubernetes merely says."""
    words = ("api-resources", "--verbs=list", "-o", "name")
    listed = [kind for scope in namespaced for kind in platform.kubectl(*words, f"--namespaced={scope}").split()]
    said = ("events", "componentstatuses")
    return ",".join(kind for kind in listed if not kind.startswith(said) and not kind.endswith(".marlaas.dev"))
