"""A job whose agents run on several pools: each pool has to exist, to allow the job, and to serve; messages name pool and agent."""

from dataclasses import replace

import pytest
from tests.operator import objects
from tests.operator.policies.scenes import (
    INSTALLATION,
    NOW,
    crashed,
    document,
    load,
    modelpool,
    new,
    pod,
    pool_snapshot,
    rljob,
    running,
)

from marlaas_api.kinds import ModelPool
from marlaas_operator.plan import WriteDocument
from marlaas_operator.policies.job import plan_job
from marlaas_operator.policies.pool import holders, pool_status
from marlaas_operator.snapshot import JobLoad, JobPool

AGENTS = [{"name": "solver"}, {"name": "judge", "poolRef": {"name": "big"}}]
TEAM = rljob({"agents": AGENTS})
SERVING = (pod("rollout"), pod("trainer"))


def big(**spec):
    return ModelPool.model_validate(objects.pool("big", **spec))


def pools(second, first=None):
    """The state of both pools. second: of `big`."""
    return first or JobPool("tiny", modelpool(), pods=SERVING), second


def plan(scene):
    return plan_job(scene, INSTALLATION, NOW)


def status(scene):
    return plan(scene).status


@pytest.mark.parametrize(
    ("found", "reason", "message"),
    [
        (
            pools(JobPool("big", problem="spec.x: no"), JobPool("tiny")),
            "PoolNotFound",
            "ModelPool 'tiny' does not exist; ModelPool 'big' of agent 'judge' cannot be read (spec.x: no); the job starts when pools of "
            "these names exist",
        ),
        (
            pools(JobPool("big", big(adapterSlots=2))),
            "NeverFits",
            "spec.training.maxStaleness: maxStaleness 1 needs 1 + 2 = 3 adapter slots, and adapterSlots of ModelPool 'big' of agent 'judge' "
            "is 2; lower maxStaleness or raise the pool's adapterSlots. The job starts once the pool is changed so that it fits",
        ),
        (
            pools(JobPool("big", big(namespaces=["team-b"]))),
            "NamespaceNotAllowed",
            "metadata.namespace: namespace 'team-a' may not use ModelPool 'big' of agent 'judge', which allows only team-b. The job starts "
            "once the pool is changed so that it fits",
        ),
    ],
)
def test_a_job_waits_until_all_its_pools_exist_and_allow_it(found, reason, message):
    scene = new(job=TEAM, pools=found)
    told = plan(scene)
    assert not any(isinstance(action, WriteDocument) for action in told.actions)
    assert (told.status["phase"], told.status["reason"], told.status["message"]) == ("Queued", reason, message)
    ready = plan(replace(scene, pools=pools(JobPool("big", big()))))
    assert any(isinstance(action, WriteDocument) for action in ready.actions)


def test_workers_of_a_pool_without_agents_of_the_job_do_not_matter_and_its_sandbox_settings_do():
    job = rljob({"agents": [AGENTS[1]]})
    scene = running(job=job, owned={}, pools=pools(JobPool("big", big(), pods=SERVING), JobPool("tiny", modelpool())))
    assert status(scene)["reason"] == "Training"
    crashing = running(
        job=TEAM, pools=pools(JobPool("big", big(), pods=(crashed(component="rollout"), pod("trainer"))))
    )
    assert status(crashing)["message"] == "rollout-0 of pool big: boom"
    bounded = modelpool(sandbox={"runtimeClassName": "gvisor"})
    scene = replace(scene, pools=pools(scene.pools[1], JobPool("tiny", bounded)))
    assert plan(scene).actions[-1].manifest["spec"]["template"]["spec"]["runtimeClassName"] == "gvisor"


def test_each_pool_counts_its_own_agents_and_is_held_by_the_job():
    team = JobLoad.of(TEAM, document(TEAM), running().progress)
    assert team.slots == {"tiny": 1, "big": 1}
    scene = pool_snapshot(jobs=(team, load("other")))
    assert pool_status(scene, NOW)["slots"] == "4/16"
    assert [job.name for job in holders(scene)] == ["sums", "other"]
