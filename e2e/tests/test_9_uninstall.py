"""Upgrading keeps everything going and every file; uninstalling leaves the kinds, their objects and the data; a release of the same name goes on with them."""

from collections.abc import Iterator

import pytest

from marlaas_e2e.api import Object
from marlaas_e2e.platform import NAMESPACE, RELEASE, Platform, endless, plain_pool, tenant

TEAM = "team-m"
RUNNING, PAUSED = "endless", "paused"
OURS = ("app.kubernetes.io/name=marlaas", "app.kubernetes.io/managed-by=marlaas-operator")
OF_THE_TESTS = {"kube-root-ca.crt", "default", "python-environment", "model-cache", "registry-login"}
"""Objects in the release's namespace that do not belong to the release: Kubernetes' own, and those of these tests."""
KEPT = {f"{RELEASE}-blobs", f"data-{RELEASE}-nats-0"}
"""The claims of adapters and bus."""
SELECTOR = f"app.kubernetes.io/name=marlaas,app.kubernetes.io/instance={RELEASE}"
DELETE_DATA = ("persistentvolumeclaims", "--selector", SELECTOR)
"""What docs/how-to/uninstall.md has people delete."""
FILE, WORDS = "/var/lib/marlaas/blobs/kept-by-the-test", "an adapter's bytes"


def begin(_: Platform) -> list[Object]:
    return [*plain_pool(), *tenant(TEAM), *(endless(job, TEAM, suspend=job == PAUSED) for job in (RUNNING, PAUSED))]


@pytest.fixture(scope="module", autouse=True)
def jobs(platform: Platform) -> Iterator[None]:
    """A job that runs and one that is suspended, and a file on the volume of the adapters."""
    platform.until(lambda: platform.step(RUNNING, TEAM), "a job runs", 600)
    platform.until(lambda: phase(platform, PAUSED) == "Suspended", "the other one is suspended", 180)
    platform.python("plain-trainer-0", "trainer", f"import pathlib; pathlib.Path('{FILE}').write_text({WORDS!r})")
    yield
    platform.kubectl("delete", "rljobs", "--all", "-A", "--timeout=60s")
    platform.kubectl("delete", "modelpools", "--all", "--timeout=60s")


def phase(platform: Platform, job: str) -> object:
    return platform.status("rljob", job, TEAM).get("phase")


def claims(platform: Platform) -> dict[str, str]:
    """Uid of each claim of the release that is not on its way out."""
    metadata = [each["metadata"] for each in platform.cluster.get("persistentvolumeclaims", "-n", NAMESPACE)["items"]]
    return {each["name"]: each["uid"] for each in metadata if each["name"] in KEPT and "deletionTimestamp" not in each}


def test_an_upgrade_with_another_value_takes_effect_and_keeps_the_pool_and_the_bus(platform):
    pods = ("plain-rollout-0", f"{RELEASE}-nats-0")
    before = [platform.get("pod", pod, NAMESPACE)["metadata"]["uid"] for pod in pods]
    platform.install("--set", "logLevel=DEBUG")
    assert "DEBUG" in platform.get("configmap", f"{RELEASE}-installation", NAMESPACE)["data"]["installation.yaml"]
    assert [platform.get("pod", pod, NAMESPACE)["metadata"]["uid"] for pod in pods] == before


def test_uninstalling_leaves_the_kinds_their_objects_and_the_data_only(platform):
    before, marked = claims(platform), histories(platform)
    assert before.keys() == KEPT
    platform.cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--timeout", "3m")
    platform.until(lambda: not left(platform), "nothing of the release is left", 300)
    assert histories(platform) == marked
    kept = [platform.get("rljob", job, TEAM) for job in (RUNNING, PAUSED)]
    assert platform.step(RUNNING, TEAM) > 0
    assert not any("finalizers" in each["metadata"] for each in kept)
    assert phase(platform, PAUSED) == "Suspended"
    assert platform.get("modelpool", "plain")
    assert claims(platform) == before


def test_a_release_of_the_same_name_takes_the_data_up_and_the_job_goes_on(platform):
    before, reached = claims(platform), platform.step(RUNNING, TEAM)
    platform.install()
    for role in ("rollout", "trainer"):  # the pool's status is still the old one
        platform.ready_pod(NAMESPACE, f"marlaas.dev/pool=plain,app.kubernetes.io/component={role}")
    platform.steps_on(RUNNING, TEAM, f"after {reached}, where the job was")
    assert platform.step(RUNNING, TEAM) > reached
    assert claims(platform) == before
    assert platform.python("plain-trainer-0", "trainer", f"print(open('{FILE}').read())").strip() == WORDS


def test_the_documented_command_deletes_the_data(platform):
    platform.cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait")
    platform.kubectl("delete", *DELETE_DATA, "-n", NAMESPACE, "--timeout=60s")
    assert claims(platform) == {}
    platform.until(lambda: not volumes(platform), "the volumes are gone with their claims")


def volumes(platform: Platform) -> list[str]:
    """Claims of the release that a volume still belongs to."""
    owners = [each["spec"].get("claimRef") or {} for each in platform.cluster.get("persistentvolumes")["items"]]
    return [owner["name"] for owner in owners if owner.get("namespace") == NAMESPACE and owner["name"] in KEPT]


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
