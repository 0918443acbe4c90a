"""What is done about a job: every way in, every way out, and nothing when nothing is to be done."""

from dataclasses import replace

import pytest
from tests.operator.policies.scenes import (
    AWAKE,
    INSTALLATION,
    META,
    NOW,
    SANDBOX,
    crashed,
    deleted,
    document,
    modelpool,
    new,
    owned_sandbox,
    pod,
    progress,
    queued,
    rljob,
    running,
    snapshot,
    tenant,
)

from marlaas_api.messages import Phase, Verdict
from marlaas_operator.plan import AddFinalizer, Apply, Delete, DeleteObject, Plan, RemoveFinalizer, WriteDocument
from marlaas_operator.policies.job import FINALIZER, FORGET_S, plan_job
from marlaas_operator.snapshot import BusState

AWAY = BusState(available=False, since=NOW - 60)
UNREAD = BusState(available=False, since=NOW - 60, synced=False)


def plan(scene, now=NOW) -> Plan:
    return plan_job(scene, INSTALLATION, now)


def told(scene, now=NOW):
    """The scene after its status was written."""
    status = plan(scene, now).status
    return scene if status is None else replace(scene, status=without_nulls(status, scene.status or {}))


def without_nulls(patch, before):
    return {key: value for key, value in {**before, **patch}.items() if value is not None}


def kinds(actions):
    return [action.manifest["kind"] if isinstance(action, Apply) else type(action).__name__ for action in actions]


def test_a_new_job_gets_its_finalizer_then_its_document_and_no_status_before_the_orchestrator_had_its_say():
    found = plan(new(meta=replace(META, finalizers=())))
    assert found.actions == (AddFinalizer(FINALIZER), WriteDocument(document(), None))
    assert (found.status, found.requeue_s) == (None, 2.0)


def test_a_job_of_which_the_orchestrator_says_nothing_says_so_after_two_seconds():
    found = plan(new(document=document()), NOW + 2)
    assert (found.status["phase"], found.status["reason"]) == ("Queued", "WaitingForOrchestrator")


def test_a_queued_job_owns_nothing_and_costs_one_status_patch_and_no_event():
    found = plan(new(document=document(), progress=queued()))
    assert found.actions == ()
    assert (found.status["phase"], found.status["reason"]) == ("Queued", "WaitingForSlots")
    assert found.events == ()
    assert plan(told(new(document=document(), progress=queued()))).empty


def test_the_document_says_the_generation_the_tenant_and_the_weight():
    tenants = (tenant("research", "team-a", weight=3),)
    [write] = plan(new(meta=replace(META, generation=4), tenants=tenants)).actions
    assert (write.document.generation, write.document.tenant, write.document.tenant_weight) == (4, "research", 3)


def test_a_raised_step_count_is_written_at_once_and_knows_what_it_replaces():
    changed = rljob({"training": {"steps": 50}})
    [write] = plan(running(job=changed, document=document(), owned=owned_sandbox(changed))).actions[:1]
    assert write == WriteDocument(document(changed), document())


@pytest.mark.parametrize(
    ("fields", "phase", "reason", "words"),
    [
        ({"pool": None}, "Queued", "PoolNotFound", "ModelPool 'tiny' does not exist"),
        ({"pool_deleting": True}, "Queued", "PoolNotFound", "is being deleted"),
        ({"pool": modelpool(namespaces=["team-b"])}, "Failed", "NamespaceNotAllowed", "namespace 'team-a' may not use"),
        ({"pool": modelpool(adapterSlots=1)}, "Failed", "NeverFits", "adapterSlots of ModelPool 'tiny' is 1"),
        ({"job": rljob({"agents": [{"name": "a"}, {"name": "b"}]})}, "Failed", "Unsupported", "one agent per job"),
        ({"job": None, "problem": "spec.poolRef: required"}, "Queued", "Unsupported", "spec.poolRef: required"),
        ({"document": document(uid="old")}, "Queued", "WaitingForOrchestrator", "an earlier job of the same name"),
    ],
)
def test_what_cannot_be_handed_over_gets_no_document_and_is_told_at_once(fields, phase, reason, words):
    scene = new(**fields)
    found = plan(scene)
    assert not any(isinstance(action, WriteDocument) and action.document.uid == "u1" for action in found.actions)
    assert (found.status["phase"], found.status["reason"]) == (phase, reason)
    assert words in found.status["message"]
    assert plan(told(scene)).status is None


def test_a_job_that_can_never_run_stays_failed_when_its_pool_is_changed_later():
    failed = told(new(pool=modelpool(adapterSlots=1)))
    assert plan(replace(failed, pool=modelpool())).empty


def test_a_job_that_waits_for_its_pool_is_handed_over_when_the_pool_comes():
    waiting = told(new(pool=None))
    assert kinds(plan(replace(waiting, pool=modelpool())).actions) == ["WriteDocument"]


def test_a_running_job_is_not_failed_by_a_pool_that_changes_or_goes():
    assert plan(told(running(pool=modelpool(namespaces=["team-b"])))).empty
    assert plan(told(running(pool=None))).empty


def test_an_earlier_job_of_the_same_name_is_forgotten_before_this_one_is_handed_over():
    left = document(uid="old")
    assert plan(new(document=left)).actions == (WriteDocument(left.model_copy(update={"deleted": True}), left),)
    assert plan(new(document=left.model_copy(update={"deleted": True}))).actions == ()


def test_an_admitted_job_gets_its_sandbox_guards_first():
    applied = plan(snapshot()).actions
    assert kinds(applied) == ["ServiceAccount", "NetworkPolicy", "Secret", "Deployment"]


def test_a_running_job_in_a_steady_state_needs_nothing():
    assert plan(told(running())) == Plan(requeue_s=600.0)


def test_a_sandbox_waits_for_its_credential():
    found = plan(told(snapshot(credential=None)))
    assert (found.actions, found.requeue_s) == ((), 15.0)


def test_a_renewed_credential_is_written_before_the_deployment_that_says_so():
    assert kinds(plan(told(running(credential="renewed"))).actions) == ["Secret", "Deployment"]


@pytest.mark.parametrize("kind", ["ServiceAccount", "NetworkPolicy", "Deployment"])
def test_an_owned_object_that_was_deleted_comes_back(kind):
    owned = {key: body for key, body in owned_sandbox().items() if key[0] != kind}
    assert kind in kinds(plan(running(owned=owned)).actions)


def test_a_secret_that_was_deleted_comes_back_when_a_pod_cannot_begin():
    waiting = pod("sandbox", ready=False, created_at=NOW - 20)
    stuck = replace(waiting, containers=(crashed().containers[0],))
    assert plan(told(running(pods=(stuck,)))).actions == ()
    stuck = replace(waiting, containers=(replace(stuck.containers[0], waiting="ContainerCreating", exit_code=None),))
    assert kinds(plan(told(running(pods=(stuck,)))).actions) == ["Secret"]


def test_what_an_earlier_job_of_this_name_has_left_goes_first():
    owned = owned_sandbox()
    owned["Deployment", SANDBOX]["metadata"]["ownerReferences"][0] |= {"uid": "old"}
    assert plan(told(running(owned=owned))).actions == (Delete("Deployment", "team-a", SANDBOX, "o1"),)


def test_before_the_bus_was_read_nothing_is_made_removed_written_or_told():
    scene = running(bus=UNREAD, document=None, progress=None, status={"phase": "Running", "reason": "Training"})
    found = plan(replace(scene, bus=BusState(available=True, since=NOW, synced=False)))
    assert found.empty


def test_while_the_bus_is_away_a_running_job_keeps_its_sandbox_and_says_what_is_wrong():
    found = plan(running(bus=AWAY))
    assert found.actions == ()
    assert (found.status["phase"], found.status["reason"]) == ("Running", "BusUnavailable")


def test_a_bus_that_restarts_is_not_worth_a_word():
    found = plan(told(running(bus=BusState(available=False, since=NOW - 1))))
    assert found == Plan(requeue_s=9.0)


def test_a_queued_job_does_not_mind_that_the_bus_is_away():
    assert plan(told(new(document=document(), progress=queued(), bus=AWAY))).empty


@pytest.mark.parametrize("phase", [Phase.SUCCEEDED, Phase.FAILED])
def test_a_job_that_has_ended_loses_its_sandbox_policy_and_account_last(phase):
    ended = told(running(progress=progress(phase, "Finished", finished_at=NOW)))
    first = plan(ended).actions
    assert first == (Delete("Deployment", "team-a", SANDBOX, "o1"),)
    draining = replace(ended, owned={k: b for k, b in ended.owned.items() if k[0] != "Deployment"})
    assert plan(draining).actions == (), "a pod still runs"
    gone = plan(replace(draining, pods=())).actions
    assert [action.kind for action in gone] == ["Secret", "NetworkPolicy", "ServiceAccount"]
    assert plan(replace(ended, owned={}, pods=())).empty


def test_a_suspended_job_loses_its_sandbox_once_the_orchestrator_has_let_it_go():
    asked = rljob({"suspend": True})
    letting_go = running(job=asked, document=document(asked), owned=owned_sandbox(asked))
    assert plan(told(letting_go)).actions == ()
    resting = replace(letting_go, progress=progress(Phase.SUSPENDED, "Suspended"))
    assert kinds(plan(resting).actions) == ["Delete"]


def test_a_job_goes_when_its_time_after_the_end_is_over_and_not_before():
    job = rljob({"ttlSecondsAfterFinished": 60})
    ended = told(new(job=job, document=document(job), progress=progress(Phase.SUCCEEDED, "Finished", finished_at=NOW)))
    assert plan(ended, NOW + 50) == Plan(requeue_s=10.0)
    due = Plan((DeleteObject("u1"),), requeue_s=10.0)
    assert plan(ended, NOW + 60) == due
    assert plan(ended, NOW + 999) == due, "a refused deletion is asked for again at this pace"


def test_a_job_that_could_never_run_goes_by_its_ttl_too():
    failed = told(new(job=rljob({"ttlSecondsAfterFinished": 60}), pool=modelpool(adapterSlots=1)))
    assert plan(failed, NOW + 61).actions == (DeleteObject("u1"),)


def test_a_succeeded_job_that_was_given_more_steps_does_not_go_by_its_ttl():
    job = rljob({"training": {"steps": 50}, "ttlSecondsAfterFinished": 60})
    ended = told(running(job=job, progress=progress(Phase.SUCCEEDED, "Finished", finished_at=NOW, step=40)))
    again = replace(ended, progress=progress(step=40))
    assert not any(isinstance(action, DeleteObject) for action in plan(again, NOW + 100).actions)


@pytest.mark.parametrize(("restarts", "limit", "fails"), [(6, 6, False), (7, 6, True), (1, 0, True)])
def test_a_sandbox_that_crashes_too_often_is_told_to_the_orchestrator(restarts, limit, fails):
    job = rljob({"backoffLimit": limit})
    scene = running(job=job, pods=(crashed("ValueError: no such task", restarts),))
    writes = [action for action in plan(scene).actions if isinstance(action, WriteDocument)]
    assert bool(writes) is fails
    if fails:
        verdict = writes[0].document.verdict
        assert verdict.reason == "BackoffLimitExceeded"
        assert verdict.message.startswith(f"its sandboxes have crashed {restarts} times, and backoffLimit is {limit}")
        assert "ValueError: no such task" in verdict.message


def test_a_verdict_that_was_given_stands_and_crashes_are_counted_when_pods_are_replaced():
    judged = document(verdict=Verdict(reason="BackoffLimitExceeded", message="often"))
    scene = running(document=judged, status={"sandboxCrashes": 7})
    assert not any(isinstance(action, WriteDocument) for action in plan(scene).actions)
    assert plan(scene).status["sandboxCrashes"] == 7


def test_a_job_without_our_finalizer_is_none_of_our_business():
    assert plan(running(meta=replace(deleted(), finalizers=()))) == Plan()


def test_a_deleted_running_job_is_stopped_and_its_sandbox_removed_before_it_goes():
    found = plan(running(meta=deleted()))
    assert kinds(found.actions) == ["WriteDocument", "Delete"]
    assert found.actions[0].document.deleted
    assert (found.status["reason"], found.requeue_s) == ("Deleting", FORGET_S - 1)


def test_a_second_look_at_a_deleted_job_asks_for_nothing_again():
    asked = told(running(meta=deleted(), document=document(deleted=True), owned={}, pods=()))
    assert plan(asked) == Plan(requeue_s=FORGET_S - 1)


@pytest.mark.parametrize("left", [None, document(uid="next")])
def test_a_deleted_job_goes_when_the_orchestrator_has_forgotten_it(left):
    found = plan(new(meta=deleted(), document=left))
    assert found.actions == (RemoveFinalizer(FINALIZER),)


def test_a_deleted_job_does_not_go_while_a_pod_of_it_still_runs():
    found = plan(new(meta=deleted(), pods=(pod("sandbox", deleting=True),)))
    assert RemoveFinalizer(FINALIZER) not in found.actions


@pytest.mark.parametrize("bus", [AWAY, UNREAD, AWAKE])
def test_a_deleted_job_goes_in_a_minute_whoever_does_not_answer_or_refuses_for_good(bus):
    scene = running(meta=deleted(ago_s=FORGET_S), bus=bus)
    assert plan(scene).actions == (RemoveFinalizer(FINALIZER),), "alone: a refused action would stand before it"
    assert RemoveFinalizer(FINALIZER) not in plan(replace(scene, meta=deleted(ago_s=FORGET_S - 1))).actions


def test_a_job_that_was_deleted_while_the_operator_was_down_gets_its_minute_too():
    found = plan(running(meta=deleted(ago_s=3600), first_seen_at=NOW - 1))
    assert kinds(found.actions) == ["WriteDocument", "Delete"]
    assert found.requeue_s == FORGET_S - 1


@pytest.mark.parametrize("bus", [AWAY, UNREAD])
def test_that_a_deleted_job_was_forgotten_is_believed_of_a_bus_that_answers_alone(bus):
    found = plan(new(meta=deleted(), bus=bus))
    assert RemoveFinalizer(FINALIZER) not in found.actions


def test_a_job_that_does_not_parse_can_be_deleted():
    assert kinds(plan(running(meta=deleted(), job=None, problem="?")).actions)[0] == "WriteDocument"
