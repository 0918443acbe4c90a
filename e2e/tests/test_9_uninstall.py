"""Upgrading keeps everything going; uninstalling leaves the kinds and their objects, and nothing else."""

from marlaas_e2e.platform import NAMESPACE, RELEASE, Platform, manifest

TEAM = "team-m"
OURS = ("app.kubernetes.io/name=marlaas", "app.kubernetes.io/managed-by=marlaas-operator")
OF_THE_TESTS = {"kube-root-ca.crt", "default", "python-environment", "model-cache"}
"""What is in the release's namespace without the release: Kubernetes' own, and the volumes of these tests."""


def test_an_upgrade_with_another_value_takes_effect_and_keeps_the_pool(platform: Platform) -> None:
    platform.tiny_pool()
    before = platform.get("pod", "tiny-rollout-0", NAMESPACE)["metadata"]["uid"]
    platform.install("--set", "logLevel=DEBUG")
    assert platform.get("configmap", f"{RELEASE}-installation", NAMESPACE)["data"]["installation.yaml"].count("DEBUG")
    assert platform.get("pod", "tiny-rollout-0", NAMESPACE)["metadata"]["uid"] == before


def test_uninstalling_leaves_the_kinds_and_their_objects_only(platform: Platform) -> None:
    platform.tenant(TEAM)
    (body,) = manifest("endless")
    body["metadata"]["namespace"] = TEAM
    paused = {**body, "metadata": {"name": "paused", "namespace": TEAM}, "spec": {**body["spec"], "suspend": True}}
    platform.apply(body, paused)
    platform.until(lambda: platform.status("rljob", "endless", TEAM).get("step"), "a job runs", 300)
    suspended = lambda: platform.status("rljob", "paused", TEAM).get("phase") == "Suspended"  # noqa: E731
    platform.until(suspended, "the other one is suspended", 180)
    platform.cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--timeout", "3m")
    platform.until(lambda: not left(platform), "nothing of the release is left", 300)
    kept = [platform.get("rljob", name, TEAM) for name in ("endless", "paused")]
    assert kept[0]["status"]["step"] > 0
    assert not any("finalizers" in each["metadata"] for each in kept)
    assert suspended()
    assert platform.get("modelpool", "tiny")
    platform.kubectl("delete", "rljobs", "--all", "-A", "--timeout=60s")
    platform.kubectl("delete", "modelpools", "--all", "--timeout=60s")


def left(platform: Platform) -> list[str]:
    """Every object, of any kind in any namespace, that says that it is of MARLaaS, and whatever is left in the release's namespace."""
    everywhere, namespaced = kinds(platform, "true", "false"), kinds(platform, "true")
    found = [platform.kubectl("get", everywhere, "-A", "-l", selector, "-o", "name").split() for selector in OURS]
    here = [name for name in platform.names(namespaced, NAMESPACE) if name.rpartition("/")[2] not in OF_THE_TESTS]
    return [name for names in (*found, here) for name in names if not name.startswith("customresourcedefinition")]


def kinds(platform: Platform, *namespaced: str) -> str:
    """Every kind that can be listed, but for ours and for what Kubernetes merely says."""
    words = ("api-resources", "--verbs=list", "-o", "name")
    listed = [kind for scope in namespaced for kind in platform.kubectl(*words, f"--namespaced={scope}").split()]
    said = ("events", "componentstatuses")
    return ",".join(kind for kind in listed if not kind.startswith(said) and not kind.endswith(".marlaas.dev"))
