"""A pool that says where its model lies and where its workers may run: a volume, nodes, taints, a priority and a login, all on a real node."""

import pytest

from marlaas_e2e.api import Object
from marlaas_e2e.handle import NotHere
from marlaas_e2e.kubectl import CommandFailed
from marlaas_e2e.platform import NAMESPACE, Platform, model_cache, plain_pool

WORKERS = {"rollout": "plain-rollout-0", "trainer": "plain-trainer-0"}


def begin(_: Platform) -> list[Object]:
    return plain_pool()


def test_the_workers_run_where_and_as_the_pool_says(platform: Platform) -> None:
    platform.pool_ready("plain")
    (pool,) = (body["spec"] for body in plain_pool() if body["kind"] == "ModelPool")
    for role, pod in WORKERS.items():
        spec = platform.get("pod", pod, NAMESPACE)["spec"]
        for name in ("nodeSelector", "affinity", "priorityClassName", "imagePullSecrets"):
            assert spec[name] == pool[role][name]
        assert spec["priority"] == 1000
        assert pool[role]["tolerations"][0] in spec["tolerations"]
        (container,) = spec["containers"]
        assert container["resources"] == {"limits": {"memory": "4Gi"}, "requests": {"cpu": "50m", "memory": "4Gi"}}


def test_the_model_comes_from_the_volume_which_no_worker_can_write(platform: Platform) -> None:
    if not model_cache():
        raise NotHere("the model's volume is a folder of this machine, which the workers of E2E_WORKER do not see")
    platform.pool_ready("plain")
    assert platform.status("modelpool", "plain")["model"].startswith("model-cache:/models/tiny-")
    for role, pod in WORKERS.items():
        with pytest.raises(CommandFailed, match="Read-only file system"):
            platform.python(pod, role, "open('/model/x', 'w')")
