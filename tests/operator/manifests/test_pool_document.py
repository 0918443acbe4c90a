"""What workers are told of their pool: what they compute with, and nothing that would restart them for nothing."""

import pytest
from tests.operator.policies.scenes import modelpool

from marlaas_operator.manifests.pool import pool_document


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ({"builtin": "tiny"}, ""),
        ({"hub": {"id": "a/b"}}, ""),
        ({"path": "/models/a"}, "/models/a"),
        ({"pvc": {"claimName": "m", "path": "/"}}, "/model"),
        ({"pvc": {"claimName": "m", "path": "/a/b/"}}, "/model/a/b"),
    ],
)
def test_the_model_lies_where_the_pod_mounts_it_and_otherwise_the_init_container_finds_it(model, path):
    assert pool_document(modelpool(model=model)).model_path == path


@pytest.mark.parametrize(
    "spec",
    [
        {"namespaces": ["team-a"]},
        {"sandbox": {"runtimeClassName": "gvisor"}},
        {"rollout": {"replicas": 3, "nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}]}},
        {"trainer": {"affinity": {"podAffinity": {}}, "priorityClassName": "p", "image": "x"}},
    ],
)
def test_where_workers_run_is_none_of_their_business(spec):
    assert pool_document(modelpool(**spec)) == pool_document(modelpool())


@pytest.mark.parametrize(
    ("workers", "threads"), [({}, None), ({"cpu": "3500m"}, 4), ({"cpu": "100m"}, 1), ({"cpu": "8", "threads": 2}, 2)]
)
def test_a_worker_that_asked_for_some_cores_computes_on_as_many(workers, threads):
    assert pool_document(modelpool(rollout=workers)).spec.rollout.threads == threads
