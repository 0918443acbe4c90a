"""Whether a job fits its pool, and whether this version can run it at all."""

from typing import Any

import pytest

from marlaas_api.kinds import ModelPool, RLJob
from marlaas_api.kinds.checks import (
    check_fit,
    check_local,
    check_local_pool,
    check_supported,
    cluster_remarks,
    pool_remarks,
    remarks,
)


def _job(**spec: Any) -> RLJob:
    body = {"poolRef": {"name": "tiny"}, "environment": {"name": "reverse"}, "training": {"steps": 3}} | spec
    return RLJob.model_validate(
        {
            "apiVersion": "marlaas.dev/v1alpha1",
            "kind": "RLJob",
            "metadata": {"name": "sums", "namespace": "team-a"},
            "spec": body,
        }
    )


def _pool(**spec: Any) -> ModelPool:
    return ModelPool.model_validate(
        {
            "apiVersion": "marlaas.dev/v1alpha1",
            "kind": "ModelPool",
            "metadata": {"name": "tiny"},
            "spec": {"model": {"builtin": "tiny"}} | spec,
        }
    )


def _agent(**adapter: Any) -> list[dict[str, Any]]:
    return [{"name": "policy", "adapter": adapter}]


LAYERS = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj"
MISFITS = {
    "rank": (
        _job(agents=_agent(rank=32)),
        _pool(maxRank=16),
        "spec.agents[0].adapter.rank: rank 32 is above maxRank 16 of ModelPool 'tiny'; lower the rank or raise the pool's maxRank",
    ),
    "slots": (
        _job(training={"steps": 3, "maxStaleness": 2}),
        _pool(adapterSlots=3),
        "spec.training.maxStaleness: maxStaleness 2 needs 2 + 2 = 4 adapter slots, and adapterSlots of ModelPool 'tiny' is 3; "
        "lower maxStaleness or raise the pool's adapterSlots",
    ),
    "namespace": (
        _job(),
        _pool(namespaces=["team-b", "team-c"]),
        "metadata.namespace: namespace 'team-a' may not use ModelPool 'tiny', which allows only team-b and team-c",
    ),
    "length": (
        _job(rollout={"maxTokens": 512}),
        _pool(rollout={"maxModelLen": 512}),
        "spec.rollout.maxTokens: maxTokens 512 leaves no room for a prompt within maxModelLen 512 of ModelPool 'tiny'; "
        "lower maxTokens or raise the pool's maxModelLen",
    ),
    "targets": (
        _job(agents=_agent(targets=["q_proj", "k_porj"])),
        _pool(),
        f"spec.agents[0].adapter.targets[1]: the builtin models have {LAYERS}, found 'k_porj'; did you mean 'k_proj'?",
    ),
    "memory": (
        _job(environment={"name": "reverse", "memory": "2Gi"}),
        _pool(sandbox={"maxMemory": "1Gi"}),
        "spec.environment.memory: memory 2Gi is above sandbox.maxMemory 1Gi of ModelPool 'tiny'; lower the memory or raise the pool's",
    ),
}


@pytest.mark.parametrize(("job", "pool", "line"), MISFITS.values(), ids=MISFITS)
def test_what_can_never_fit_is_refused_with_the_numbers_of_both_sides(job: RLJob, pool: ModelPool, line: str) -> None:
    assert [str(problem) for problem in check_fit(job, pool)] == [line]


def test_what_fits_exactly_is_taken() -> None:
    job = _job(
        agents=_agent(rank=16), training={"steps": 3, "maxStaleness": 1}, rollout={"maxTokens": 511, "maxTurns": 1}
    )
    pool = _pool(adapterSlots=3, maxRank=16, namespaces=["team-a"], rollout={"maxModelLen": 512})
    assert list(check_fit(job, pool)) == []
    assert list(remarks(job, pool)) == []


def test_layers_of_a_model_that_is_not_builtin_are_its_own_business() -> None:
    job = _job(agents=_agent(targets=["qkv"]))
    assert list(check_fit(job, _pool(model={"path": "/models/x"}))) == []


UNSUPPORTED = {
    "several agents": (
        _job(agents=[{"name": "a"}, {"name": "b"}]),
        "spec.agents: this version of MARLaaS trains one agent per job, found 2; create one job per agent",
    ),
    "an agent elsewhere": (
        _job(agents=[{"name": "a", "poolRef": {"name": "big"}}]),
        "spec.agents[0].poolRef.name: this version of MARLaaS serves all agents of a job from the job's pool 'tiny', found 'big'; remove poolRef from the agent",
    ),
    "nothing to train": (
        _job(agents=[{"name": "a", "trainable": False}]),
        "spec.agents[0].trainable: no agent of the job is trainable; set trainable: true",
    ),
}


@pytest.mark.parametrize(("job", "line"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_the_schema_carries_and_nobody_can_do_yet_is_refused(job: RLJob, line: str) -> None:
    assert [str(problem) for problem in check_supported(job)] == [line]


def test_an_agent_may_name_the_jobs_own_pool() -> None:
    assert list(check_supported(_job(agents=[{"name": "a", "poolRef": {"name": "tiny"}}]))) == []


def test_images_secrets_and_volumes_need_a_cluster() -> None:
    image = _job(environment={"image": "games:1", "entrypoint": ["play"]})
    secret = _job(environment={"name": "reverse", "secretRefs": [{"name": "key"}]})
    assert [str(problem) for problem in (*check_local(image), *check_local(secret))] == [
        "spec.environment.image: container images need a cluster; for `marlaas run`, set name instead: a builtin environment or "
        "module:attribute",
        "spec.environment.secretRefs: Secrets need a cluster; for `marlaas run`, remove secretRefs and set the environment variables in your shell",
    ]
    volume = _pool(model={"pvc": {"claimName": "models"}})
    assert [str(problem) for problem in check_local_pool(volume)] == [
        "spec.model.pvc: volumes need a cluster; for `marlaas run`, set path, hub or builtin instead"
    ]
    token = _pool(model={"hub": {"id": "a/b", "tokenSecretRef": {"name": "hub"}}})
    assert [str(problem) for problem in check_local_pool(token)] == [
        "spec.model.hub.tokenSecretRef: Secrets need a cluster; for `marlaas run`, remove tokenSecretRef and set HF_TOKEN in your shell"
    ]


def test_what_a_cluster_follows_and_this_machine_does_without_is_told() -> None:
    job = _job(
        backoffLimit=0, environment={"name": "reverse", "cpu": "500m", "imagePullSecrets": [{"name": "registry"}]}
    )
    pool = _pool(
        sandbox={"runtimeClassName": "gvisor"},
        trainer={
            "nodeSelector": {"disk": "fast"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
            "priorityClassName": "high",
            "image": "worker:2",
            "imagePullSecrets": [{"name": "registry"}],
        },
    )
    told = [*cluster_remarks(job), *pool_remarks(pool)]
    assert {problem.text for problem in told} == {"used only in a cluster; `marlaas run` ignores it"}
    assert [problem.path for problem in told] == [
        "spec.environment.imagePullSecrets",
        "spec.environment.cpu",
        "spec.backoffLimit",
        "spec.sandbox",
        "spec.trainer.nodeSelector",
        "spec.trainer.tolerations",
        "spec.trainer.affinity",
        "spec.trainer.priorityClassName",
        "spec.trainer.image",
        "spec.trainer.imagePullSecrets",
    ]
    assert [*cluster_remarks(_job()), *pool_remarks(_pool())] == []


REMARKS = {
    "clip": (
        _job(training={"steps": 3, "clip": {"high": 0.3}}),
        "spec.training.clip: clip has no effect with ratio: proximal, because a step is one update; remove it, or choose ratio: behaviour",
    ),
    "correction": (
        _job(training={"steps": 3, "maxStaleness": 2, "correction": {"type": "none"}}),
        "spec.training.correction.type: with ratio: proximal and correction none, tokens up to 2 versions old are trained without importance weights, "
        "as if the newest version had sampled them; choose truncated, or ratio: behaviour",
    ),
    "scale": (
        _job(agents=_agent(rank=8, alpha=12)),
        "spec.agents[0].adapter.alpha: alpha / rank is 1.5, which is not a power of two: engine and trainer will round the adapter "
        "differently",
    ),
    "egress": (
        _job(environment={"name": "reverse", "egress": [{"cidr": "10.0.0.0/8"}]}),
        "spec.environment.egress: enforced only in a cluster; `marlaas run` does not restrict the network",
    ),
    "context": (
        _job(rollout={"maxTurns": 9, "maxTokens": 256}),
        "spec.rollout.maxTurns: maxTurns 9 x maxTokens 256 = 2304 tokens do not fit into maxModelLen 2048 of ModelPool 'tiny': "
        "longer episodes end when the context is full, and are scored",
    ),
}


@pytest.mark.parametrize(("job", "line"), REMARKS.values(), ids=REMARKS)
def test_what_is_probably_not_meant_is_remarked(job: RLJob, line: str) -> None:
    assert [str(problem) for problem in remarks(job, _pool())] == [line]


@pytest.mark.parametrize(
    "training",
    [
        {"ratio": "behaviour", "clip": {"high": 0.3}, "correction": {"type": "none"}},
        {"algorithm": "cispo", "clip": {"high": 7}, "correction": {"type": "none"}},
        {"correction": {"type": "none"}, "maxStaleness": 0},
    ],
)
def test_a_clip_or_no_correction_where_it_means_something_needs_no_remark(training: dict[str, Any]) -> None:
    assert list(remarks(_job(training={"steps": 3, **training}), _pool())) == []


def test_defaults_need_no_remark() -> None:
    assert list(remarks(_job(), _pool())) == []
