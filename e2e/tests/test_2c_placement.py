"""A pool that says where its model lies and where its workers may run: a volume, nodes, taints, a priority and a login, all on a real node."""

from collections.abc import Iterator

import pytest

from marlaas.models import prepare
from marlaas_e2e.api import Object
from marlaas_e2e.handle import NotHere
from marlaas_e2e.kubectl import CommandFailed
from marlaas_e2e.platform import NAMESPACE, Platform, model_cache

POOL, PRIORITY, LOGIN = "from-volume", "above-others", "registry-login"
WORKERS = ("rollout", "trainer")


def objects() -> list[Object]:
    linux = {"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [linux]}]}
    where: Object = {
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}},
        "priorityClassName": PRIORITY,
        "imagePullSecrets": [{"name": LOGIN}],
        "cpu": "50m",
        "memory": "2Gi",
    }
    spec: Object = {
        "model": {"pvc": {"claimName": "model-cache", "path": f"/models/{prepare('tiny').name}"}},
        "maxRank": 8,
        "rollout": {**where, "engine": "reference", "maxModelLen": 128},
        "trainer": where,
    }
    login = {"name": LOGIN, "namespace": NAMESPACE}
    return [
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": PRIORITY}, "value": 1000},
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": login,
            "type": "kubernetes.io/dockerconfigjson",
            "stringData": {".dockerconfigjson": '{"auths": {}}'},
        },
        {"apiVersion": "marlaas.dev/v1alpha1", "kind": "ModelPool", "metadata": {"name": POOL}, "spec": spec},
    ]


@pytest.fixture(scope="module")
def workers(platform: Platform) -> Iterator[list[Object]]:
    """The pods of that pool, once they serve."""
    if not model_cache():
        raise NotHere("the model's volume is a folder of this machine, which the workers of E2E_WORKER do not see")
    platform.apply(*objects())
    platform.pool_ready(POOL)
    yield [platform.get("pod", f"{POOL}-{role}-0", NAMESPACE) for role in WORKERS]
    platform.kubectl("delete", "modelpool", POOL, "--timeout=120s")
    platform.kubectl("delete", "priorityclass", PRIORITY)
    platform.kubectl("delete", "secret", LOGIN, "-n", NAMESPACE)


def test_the_workers_run_where_and_as_the_pool_says(workers: list[Object]) -> None:
    for pod in workers:
        spec = pod["spec"]
        assert spec["nodeSelector"] == {"kubernetes.io/os": "linux"}
        assert "nvidia.com/gpu" in [toleration.get("key") for toleration in spec["tolerations"]]
        assert "nodeAffinity" in spec["affinity"]
        assert (spec["priorityClassName"], spec["priority"]) == (PRIORITY, 1000)
        assert spec["imagePullSecrets"] == [{"name": LOGIN}]
        (container,) = spec["containers"]
        assert container["resources"] == {"limits": {"memory": "2Gi"}, "requests": {"cpu": "50m", "memory": "2Gi"}}


def test_the_model_comes_from_the_volume_which_nobody_can_write(platform: Platform, workers: list[Object]) -> None:
    assert platform.status("modelpool", POOL)["model"].startswith("model-cache:/models/tiny-")
    for pod, role in zip(workers, WORKERS, strict=True):
        assert any(mount["mountPath"] == "/model" and mount["readOnly"] for mount in mounts(pod))
        program = ("exec", "-n", NAMESPACE, pod["metadata"]["name"], "-c", role, "--", "touch", "/model/x")
        with pytest.raises(CommandFailed, match="Read-only file system"):
            platform.kubectl(*program)


def mounts(pod: Object) -> list[Object]:
    found: list[Object] = pod["spec"]["containers"][0]["volumeMounts"]
    return found
