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
    ("workers", "threads"), [({}, None), ({"cpu": "3500m"}, 4), ({"cpu": "100m"}, 1), ({"cpu": "8", "threads": 2}, 2)]
)
def test_a_worker_that_asked_for_some_cores_computes_on_as_many(workers, threads):
    assert pool_document(modelpool(rollout=workers)).spec.rollout.threads == threads
