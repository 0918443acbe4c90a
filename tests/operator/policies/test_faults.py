"""From a pod's own status, as the kubelet writes it, to one reason and its words; and what a job says of a pod that it lacks."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tests.operator.policies.scenes import container, crashed, document, new, pod, queued, repooled, running, scene_rows
from tests.operator.policies.test_job_status import conditions, status
from tests.tables import rows

from marlaas_operator.pod_facts import first_fault, pod_facts, pod_fault, refusal_of
from marlaas_operator.snapshot import BusState

SCENES = yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text())
BACK_OFF = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}}
READY = "[{type: Ready, status: 'True'}]"
FULL = 'Usage of EmptyDir volume "tmp" exceeds the limit "1Gi". '
QUOTA = {"status": {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}]}}


def fault(containers="[]", init="[]", conditions="[]", phase="Pending", **meta):
    return pod_fault(facts(containers, init, conditions, phase, **meta))


def facts(containers="[]", init="[]", conditions="[]", phase="Pending", **meta):
    status = {"phase": phase, "conditions": yaml.safe_load(conditions)}
    status |= {"containerStatuses": yaml.safe_load(containers), "initContainerStatuses": yaml.safe_load(init)}
    labels = {"app.kubernetes.io/component": "sandbox"}
    return pod_facts({"metadata": {"name": "p-0", "labels": labels, **meta}, "status": status})


def one(state, lastState=None, **fields):  # noqa: N803 - as the kubelet writes it
    container = {"name": "supervisor", "image": "w:1", "ready": False, "restartCount": 0, "state": state}
    return yaml.safe_dump([{**container, "lastState": lastState or {}, **fields}])


def ended(code, reason="Error", message=""):
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


@pytest.mark.parametrize("scene", SCENES, ids=[scene["scene"] for scene in SCENES])
def test_what_a_container_says_becomes_a_reason_and_its_own_words(scene):
    found = fault(one(**scene["container"]))
    assert (found and found.reason, found and found.message) == (scene.get("reason"), scene.get("says"))


@pytest.mark.parametrize(("words", "reason"), rows(__file__, "unschedulable"))
def test_a_pod_without_a_node_tells_in_the_schedulers_words(words, reason):
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    found = fault(conditions=yaml.safe_dump([condition]))
    assert (found.reason, found.message) == (reason, words)


@pytest.mark.parametrize(("code", "reason"), [(2, "ModelNotFound"), (1, "ContainerCrashing")])
def test_a_model_that_only_a_person_can_bring_is_not_found_and_other_failures_are_tried_again(code, reason):
    init = one(BACK_OFF, ended(code, message="no model at /model/x"), name="model")
    waiting = one({"waiting": {"reason": "PodInitializing"}})
    found = fault(waiting, init)
    assert (found.reason, found.message) == (reason, "no model at /model/x")


def test_a_pod_that_serves_ends_or_was_replaced_has_no_fault():
    assert fault(one({"running": {}}), one(ended(0, "Completed"), ended(1), name="model", ready=True)) is None
    crash = one({"running": {}}, ended(1), ready=True, restartCount=9)
    assert fault(crash, conditions=READY) is None
    assert fault(one(ended(1)), deletionTimestamp="2026-11-21T16:00:00Z") is None
    assert fault(one(ended(1)), phase="Failed") is None


def evicted(message, name="p-0", created_at=1.0):
    return replace(facts(phase="Failed"), name=name, reason="Evicted", message=message, created_at=created_at)


@pytest.mark.parametrize(("message", "is_at_fault"), rows(__file__, "evictions"))
def test_an_evicted_pod_is_at_fault_for_what_it_wrote_itself_and_not_for_a_node_that_was_short(message, is_at_fault):
    found = pod_fault(evicted(message))
    expected = ("ContainerCrashing", f"it was evicted: {message.strip()}")
    assert (found and (found.reason, found.message)) == (expected if is_at_fault else None)


def test_an_eviction_is_told_until_a_pod_that_was_made_later_serves():
    gone, beside = evicted(FULL), replace(facts(conditions=READY), name="p-1", created_at=1.0)
    starting = replace(facts(one({"running": {}})), name="p-2", created_at=9.0)
    assert first_fault([gone, beside, starting]).message == f"p-0: it was evicted: {FULL.strip()}"
    assert first_fault([gone, beside, replace(starting, ready=True)]) is None
    assert first_fault([gone, replace(starting, ready=True, component="trainer")]) is not None


def test_what_is_wrong_now_is_told_rather_than_what_was_of_the_first_pod_by_name_and_with_its_owner():
    now = replace(facts(one(ended(1, message="x"))), name="p-9", created_at=9.0)
    assert first_fault([evicted(FULL), now]).message == "p-9: x"
    assert facts(one({"running": {}}, restartCount=2), one(ended(1), restartCount=5, name="model")).restarts == 2
    broken = facts(one(ended(1, message="x")))
    assert first_fault([broken], " of pool tiny").message == "p-0 of pool tiny: x"
    assert first_fault([facts(conditions=READY)]) is None


STARTING = pod("rollout", container("rollout", running=True), ready=False)


@pytest.mark.parametrize(("pods", "reason", "message"), scene_rows(__file__, "missing_workers"))
def test_a_running_job_says_who_is_not_there_without_whom_it_makes_no_step(pods, reason, message):
    """pods: of the pool, or the state of the bus."""
    found = status(running(bus=pods) if isinstance(pods, BusState) else running(on={"pods": pods}))
    assert (found["phase"], found["reason"], found.get("message")) == ("Running", reason, message)


def test_pods_that_the_namespace_refuses_are_told_by_the_deployment():
    assert refusal_of({"status": {"conditions": [{"type": "Available", "status": "True"}]}}) is None
    scene = running(pods=())
    (key,) = [key for key in scene.owned if key[0] == "Deployment"]
    found = status(replace(scene, owned={**scene.owned, key: {**scene.owned[key], **QUOTA}}))
    assert (found["reason"], found["message"]) == ("PodRefused", "exceeded quota")


def test_a_queued_job_hears_what_its_pool_waits_for_and_of_its_trouble_only_if_it_waits_for_the_pool():
    broken = (crashed("boom", component="rollout"),)
    waits = new(document=document(), progress=queued("WaitingForPool", "no replica is ready"), on={"pods": broken})
    assert status(waits)["reason"] == "ContainerCrashing"
    assert conditions(waits)["Admitted"] == ("False", "WaitingForPool")
    assert status(replace(waits, progress=queued()))["reason"] == "WaitingForSlots"
    found = status(repooled(waits, pods=(STARTING,)))
    expected = "no replica is ready: rollout-0 of pool tiny is starting; the job continues when it is ready"
    assert (found["reason"], found["message"]) == ("WaitingForPool", expected)
