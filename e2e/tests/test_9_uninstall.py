"""Upgrading keeps everything going; uninstalling leaves the kinds and their objects, and nothing else."""

from marlaas_e2e.platform import NAMESPACE, RELEASE, Platform


def test_an_upgrade_with_another_value_takes_effect_and_keeps_the_pool(platform: Platform) -> None:
    before = platform.get("pod", "tiny-rollout-0", NAMESPACE)["metadata"]["uid"]
    platform.install("--set", "logLevel=DEBUG")
    assert platform.get("configmap", f"{RELEASE}-installation", NAMESPACE)["data"]["installation.yaml"].count("DEBUG")
    assert platform.get("pod", "tiny-rollout-0", NAMESPACE)["metadata"]["uid"] == before


def test_uninstalling_leaves_the_kinds_and_their_objects_only(platform: Platform) -> None:
    platform.cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--timeout", "3m")
    kinds = "all,configmaps,secrets,serviceaccounts,roles,rolebindings,networkpolicies,poddisruptionbudgets,pvc"
    ours = "app.kubernetes.io/name=marlaas"
    platform.until(lambda: not platform.names(kinds, NAMESPACE, ours), "nothing of the release is left", 120)
    cluster_wide = "clusterroles,clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings"
    assert not platform.kubectl("get", cluster_wide, "-l", ours, "-o", "name").split()
    assert "rljob.marlaas.dev/reverse" in platform.names("rljobs", "team-a")
    platform.kubectl("delete", "rljobs", "--all", "-A", "--timeout=60s")
    platform.kubectl("delete", "modelpools", "--all", "--timeout=60s")
