"""How a job ends: by its ttl, by its sandboxes' crashes, by being deleted."""

from dataclasses import replace

import pytest
from tests.operator.policies import scenes
from tests.operator.policies.scenes import NOW, crashed, deleted, document, new, pod, progress, rljob, running
from tests.operator.policies.test_job import AWAY, UNREAD, kinds, plan, told

from marlaas_api.messages import JobVerdict, Phase
from marlaas_operator.plan import DeleteObject, Plan, RemoveFinalizer, WriteDocument
from marlaas_operator.policies.job import FINALIZER, FORGET_S
from marlaas_worker.sandbox.attempt import MAX_DELIVERIES

FROZEN = rljob({"ttlSecondsAfterFinished": 60, "agents": [{"name": "a", "trainable": False}]})
MEMORY = scenes.container(restarts=2, exit_code=137, exit_reason="OOMKilled")


def test_a_job_goes_when_its_time_after_the_end_is_over_and_not_before():
    job = rljob({"ttlSecondsAfterFinished": 60})
    ended = told(new(job=job, document=document(job), progress=progress(Phase.SUCCEEDED, step=40, finished_at=NOW)))
    assert plan(ended, NOW + 50) == Plan(requeue_s=10.0)
    due = Plan((DeleteObject("u1"),), requeue_s=10.0)
    assert plan(ended, NOW + 60) == due
    assert plan(ended, NOW + 999) == due, "a refused deletion is asked for again at this pace"
    waits = told(new(job=job, on={"pool": scenes.modelpool(adapterSlots=1)}))
    assert plan(waits, NOW + 1e6).empty, "it waits for a larger pool"


@pytest.mark.parametrize("status", [None, {"phase": "Queued", "reason": "PoolNotFound"}])
def test_the_plan_by_which_a_job_ends_looks_again_when_its_ttl_is_over(status):
    """Our own write of the end is no news, and a job without a sandbox may hear no other."""
    job = rljob({"ttlSecondsAfterFinished": 60})
    ended = new(job=job, status=status, document=document(job))
    ended = replace(ended, progress=progress(Phase.FAILED, "DeadlineExceeded", finished_at=NOW))
    assert plan(ended).requeue_s == 60.0
    refused = new(job=FROZEN, status=status, first_seen_at=NOW - 100)
    assert plan(refused).requeue_s == 60.0


@pytest.mark.parametrize("bus", [AWAY, scenes.AWAKE])
def test_a_job_that_was_given_more_steps_does_not_go_by_its_ttl_before_the_orchestrator_has_heard_of_them(bus):
    job = rljob({"ttlSecondsAfterFinished": 60})
    ended = told(new(job=job, document=document(job), progress=progress(Phase.SUCCEEDED, step=40, finished_at=NOW)))
    more = replace(ended, job=rljob({"training": {"steps": 50}, "ttlSecondsAfterFinished": 60}), bus=bus)
    assert not any(isinstance(action, DeleteObject) for action in plan(more, NOW + 61).actions)


@pytest.mark.parametrize("unknown", [{"bus": UNREAD}, {"unreadable": "schema version 2"}])
def test_a_job_whose_progress_is_not_known_does_not_go_by_its_ttl(unknown):
    failed = {"phase": "Failed", "finishedAt": "2020-01-01T00:00:00Z"}
    ended = new(job=rljob({"ttlSecondsAfterFinished": 60}), status=failed)
    assert DeleteObject("u1") in plan(ended).actions
    assert DeleteObject("u1") not in plan(replace(ended, **unknown)).actions


@pytest.mark.parametrize(("restarts", "limit", "fails"), [(6, 6, False), (7, 6, True), (1, 0, True)])
def test_a_sandbox_that_crashes_too_often_is_told_to_the_orchestrator(restarts, limit, fails):
    job = rljob({"backoffLimit": limit})
    scene = running(job=job, pods=(crashed("ValueError: no such task", restarts),))
    writes = [action for action in plan(scene).actions if isinstance(action, WriteDocument)]
    assert bool(writes) is fails
    if fails:
        verdict = writes[0].document.verdict
        assert verdict.reason == "BackoffLimitExceeded"
        words = f"one of its sandboxes has crashed {restarts} times in a row, and backoffLimit is {limit}"
        assert verdict.message.startswith(words)
        assert "ValueError: no such task" in verdict.message


def test_a_task_whose_memory_kills_one_sandbox_after_the_other_ends_the_job_before_it_is_given_up():
    limit = rljob({}).spec.backoff_limit
    pods = tuple(pod("sandbox", MEMORY, name=f"s-{number}", ready=False) for number in range(limit // 2 + 1))
    scene = running(pods=pods)
    [write] = [action for action in plan(scene).actions if isinstance(action, WriteDocument)]
    assert write.document.verdict.message == (
        f"its sandboxes have exceeded their limit of memory or disk {limit + 2} times in a row, and backoffLimit is {limit}; "
        "the last crash: s-0: container supervisor exceeded its memory limit"
    )
    assert limit + 1 < MAX_DELIVERIES


def test_a_verdict_on_which_nobody_has_acted_yet_goes_when_its_limit_is_raised():
    judged = document(verdict=JobVerdict(reason="BackoffLimitExceeded", message="often"))
    scene = running(document=judged, pods=(crashed(restarts=7),), job=rljob({"backoffLimit": 10}))
    [write] = [action for action in plan(scene).actions if isinstance(action, WriteDocument)]
    assert write.document.verdict is None
    ended = replace(scene, progress=progress(Phase.FAILED, "BackoffLimitExceeded", finished_at=NOW))
    writes = [action for action in plan(ended).actions if isinstance(action, WriteDocument)]
    assert all(write.document.verdict == judged.verdict for write in writes), "what has ended stays ended"


@pytest.mark.parametrize(("pods", "crashes"), scenes.scene_rows(__file__, "crashes"))
def test_crashes_in_a_row_of_one_sandbox_count_and_those_of_its_node_do_not(pods, crashes):
    assert plan(running(pods=pods)).status.get("sandboxCrashes") == crashes


def test_a_deleted_running_job_is_stopped_and_its_sandbox_removed_before_it_goes_and_nothing_is_asked_for_again():
    for parses in ({}, {"job": None, "problem": "?"}):
        found = plan(running(meta=deleted(), **parses))
        assert kinds(found.actions) == ["WriteDocument", "Delete"]
        assert found.actions[0].document.deleted
        assert (found.status["reason"], found.requeue_s) == ("Deleting", FORGET_S - 1)
    asked = told(running(meta=deleted(), document=document(deleted=True), owned={}, pods=()))
    assert plan(asked) == Plan(requeue_s=FORGET_S - 1)
    assert plan(running(meta=replace(deleted(), finalizers=()))) == Plan(), "without our finalizer"


@pytest.mark.parametrize("left", [None, document(uid="next")])
def test_a_deleted_job_goes_when_the_orchestrator_has_forgotten_it(left):
    found = plan(new(meta=deleted(), document=left))
    assert found.actions == (RemoveFinalizer(FINALIZER),)
    ending = plan(new(meta=deleted(), document=left, pods=(pod("sandbox", deleting=True),)))
    assert RemoveFinalizer(FINALIZER) not in ending.actions, "a pod of it still runs"


@pytest.mark.parametrize("bus", [AWAY, UNREAD, scenes.AWAKE])
def test_a_deleted_job_goes_in_a_minute_whoever_does_not_answer_or_refuses_for_good(bus):
    scene = running(meta=deleted(ago_s=FORGET_S), bus=bus)
    assert plan(scene).actions == (RemoveFinalizer(FINALIZER),), "alone: a refused action would stand before it"
    assert RemoveFinalizer(FINALIZER) not in plan(scene, NOW - 1).actions


@pytest.mark.parametrize("ago_s", [3600, -3600], ids=["the operator was down, or is ahead", "the API server is ahead"])
def test_a_deletions_minute_is_counted_by_our_own_clock_from_when_it_was_seen(ago_s):
    found = plan(running(meta=deleted(ago_s=ago_s), deletion_seen_at=NOW - 1))
    assert kinds(found.actions) == ["WriteDocument", "Delete"]
    assert found.requeue_s == FORGET_S - 1


@pytest.mark.parametrize("bus", [AWAY, UNREAD])
def test_that_a_deleted_job_was_forgotten_is_believed_of_a_bus_that_answers_alone(bus):
    found = plan(new(meta=deleted(), bus=bus))
    assert RemoveFinalizer(FINALIZER) not in found.actions
