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
    owned_sandbox,
    pod,
    pool_snapshot,
    queued,
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
            pools(JobPool("big")),
            "PoolNotFound",
            "ModelPool 'big' of agent 'judge' does not exist; the job starts when a pool of this name exists",
        ),
        (
            pools(JobPool("big", big(), deleting=True)),
            "PoolNotFound",
            "ModelPool 'big' of agent 'judge' is being deleted; the job starts when a pool of this name exists",
        ),
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


@pytest.mark.parametrize(
    ("pods", "reason", "message"),
    [
        (
            (pod("rollout"), pod("trainer", ready=False)),
            "TrainerStarting",
            "trainer-0 of pool big is starting; the job continues when it is ready",
        ),
        ((), "RolloutStarting", "pool big has no rollout worker yet; the job continues when it is ready"),
        ((crashed(component="rollout"), pod("trainer")), "ContainerCrashing", "rollout-0 of pool big: boom"),
    ],
)
def test_a_running_job_says_which_of_its_pools_does_not_serve(pods, reason, message):
    found = status(running(job=TEAM, pools=pools(JobPool("big", big(), pods=pods))))
    assert (found["phase"], found["reason"], found["message"]) == ("Running", reason, message)


def test_a_job_that_waits_for_one_pool_says_why_that_pool_does_not_serve():
    waits = queued("WaitingForPool", message="no rollout replica of pool big is ready yet")
    late = pools(JobPool("big", big(), pods=(pod("rollout", ready=False),)))
    found = status(new(job=TEAM, document=document(TEAM), progress=waits, pools=late))
    assert found["message"] == (
        "no rollout replica of pool big is ready yet: rollout-0 of pool big is starting; the job continues when it is ready"
    )


def test_workers_of_a_pool_without_agents_of_the_job_do_not_matter_and_its_sandbox_settings_do():
    job = rljob({"agents": [AGENTS[1]]})
    scene = running(job=job, owned={}, pools=pools(JobPool("big", big(), pods=SERVING), JobPool("tiny", modelpool())))
    assert status(scene)["reason"] == "Training"
    bounded = modelpool(sandbox={"runtimeClassName": "gvisor"})
    scene = replace(scene, pools=pools(scene.pools[1], JobPool("tiny", bounded)))
    assert plan(scene).actions[-1].manifest["spec"]["template"]["spec"]["runtimeClassName"] == "gvisor"


def test_a_published_job_goes_on_when_a_pool_is_changed_or_deleted():
    settled = running(job=TEAM, owned=owned_sandbox(TEAM), pools=pools(JobPool("big", big(), pods=SERVING)))
    told = replace(settled, status=status(settled))
    for later in (JobPool("big", big(adapterSlots=1), pods=SERVING), JobPool("big", big(), "", True, SERVING)):
        assert plan(replace(told, pools=pools(later))).empty


def test_each_pool_counts_its_own_agents_and_is_held_by_the_job():
    team = JobLoad.of(TEAM, document(TEAM), running().progress)
    assert team.slots == {"tiny": 1, "big": 1}
    scene = pool_snapshot(jobs=(team, load("other")))
    assert pool_status(scene, NOW)["slots"] == "4/16"
    assert [job.name for job in holders(scene)] == ["sums", "other"]
