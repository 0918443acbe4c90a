"""The conditions of a job's status, and its events: one for each transition."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tests.operator.policies.scenes import NOW, container, crashed, new, pod, progress, rljob, running, scene_rows
from tests.operator.policies.test_job import plan

from marlaas_api.kinds.status import RLJobStatus
from marlaas_api.messages import Phase
from marlaas_operator.plan import WriteDocument

FIGURES = yaml.safe_load(Path(__file__).with_name("figures.yaml").read_text())


def status(scene, now=NOW):
    return plan(scene, now).status


def conditions(scene, now=NOW):
    return {c["type"]: (c["status"], c["reason"]) for c in status(scene, now)["conditions"]}


def test_a_condition_keeps_its_time_until_its_status_turns():
    first = running(pods=())
    stored = status(first)
    later = status(replace(first, status=stored, progress=progress(tokens=5)), NOW + 60)
    assert later["conditions"] == stored["conditions"]
    turned = status(replace(running(), status=stored), NOW + 60)
    times = {c["type"]: c["lastTransitionTime"] for c in turned["conditions"]}
    assert times == {"Admitted": "2027-01-15T08:00:00Z", "SandboxReady": "2027-01-15T08:01:00Z"}


@pytest.mark.parametrize(("scene", "expected"), scene_rows(__file__, "conditions"))
def test_conditions_admitted_and_sandbox_ready(scene, expected):
    found = conditions(scene)
    assert (found["Admitted"], found["SandboxReady"]) == expected


def test_a_warning_of_the_job_is_the_condition_healthy_and_an_event_and_its_end_too():
    unhealthy = running(progress=progress(warnings={"RepliesCut": "40 % of the replies", "NoSignal": "9 of 10 groups"}))
    first = plan(unhealthy)
    found = {c["type"]: (c["status"], c["reason"], c["message"]) for c in first.status["conditions"]}
    assert found["Healthy"] == ("False", "RepliesCut", "40 % of the replies; 9 of 10 groups")
    assert ("Warning", "RepliesCut") in [(one.type, one.reason) for one in first.events]
    next_step = progress(warnings={"RepliesCut": "41 % of the replies", "NoSignal": "9 of 10 groups"})
    same = plan(replace(running(), status=first.status, progress=next_step))
    assert (same.urgent, same.events) == (False, ()), "a figure that changes with each step is no transition"
    later = plan(replace(running(), status=first.status))
    assert {c["type"]: c["status"] for c in later.status["conditions"]}["Healthy"] == "True"
    assert "Healthy" not in conditions(running())


def test_complete_and_failed_appear_at_the_end_and_turn_when_a_job_goes_on():
    ended = running(progress=progress(Phase.SUCCEEDED, "Finished", step=40, finished_at=NOW))
    assert conditions(ended)["Complete"] == ("True", "Finished")
    assert "Failed" not in conditions(ended)
    again = replace(running(job=rljob({"training": {"steps": 50}})), status=status(ended))
    assert conditions(again)["Complete"] == ("False", "Training")
    assert status(again)["finishedAt"] is None, "removed by the patch"


def test_conditions_and_fields_of_somebody_else_stay():
    foreign = {"type": "Billing", "status": "True", "reason": "Paid", "message": "", "lastTransitionTime": "x"}
    found = status(running(status={"conditions": [foreign], "invoice": 7, "steps": 3}))
    assert foreign in found["conditions"]
    assert "invoice" not in found


def pulling(words):
    return pod("sandbox", container(waiting=words, message="no such image", image="x:1"), ready=False)


@pytest.mark.parametrize(("fields", "reason", "words"), scene_rows(__file__, "hindrances"))
def test_what_keeps_a_running_job_from_going_on_beats_what_the_orchestrator_says(fields, reason, words):
    found = status(running(**fields))
    assert (found["phase"], found["reason"]) == ("Running", reason)
    assert words in found["message"]


def test_a_running_job_that_does_not_parse_any_more_says_so_and_is_kept_as_it_was_handed_over():
    scene = running(job=None, problem="spec.rollout.temperature: must be at least 0.01, found 0")
    found = status(scene)
    assert (found["phase"], found["reason"]) == ("Running", "InvalidSpec")
    assert found["message"].startswith(scene.problem)
    assert conditions(scene)["SandboxReady"] == ("True", "SandboxReady")
    assert plan(scene).actions == ()
    gone = plan(replace(scene, owned={}))
    kinds = [action.manifest["kind"] for action in gone.actions]
    assert kinds == ["ServiceAccount", "NetworkPolicy", "Secret", "Deployment"]


def test_a_tenant_that_does_not_parse_takes_no_running_job_away_from_itself():
    theirs = running().document.model_copy(update={"tenant": "a", "tenant_weight": 2.0})
    scene = running(document=theirs)
    assert [type(action).__name__ for action in plan(scene).actions][:1] == ["WriteDocument"]
    kept = plan(replace(scene, unread_tenant="a"))
    assert not any(isinstance(action, WriteDocument) for action in kept.actions)


def test_a_final_status_stays_when_the_bus_has_forgotten_everything():
    ended = running(progress=progress(Phase.SUCCEEDED, "Finished", step=40, finished_at=NOW), owned={}, pods=())
    forgotten = replace(ended, status=status(ended), document=None, progress=None)
    found = plan(forgotten)
    assert found.status is None
    assert found.actions == ()


def events(before, scene, now=NOW):
    """Events when the scene comes after another whose status was written."""
    stored = {key: value for key, value in status(before).items() if value is not None}
    return [(event.type, event.reason) for event in plan(replace(scene, status=stored), now).events]


def test_a_fault_begins_and_ends_with_one_event_each_and_goes_away_by_itself():
    broken = running(pods=(crashed(),))
    assert events(running(), broken) == [("Warning", "ContainerCrashing")]
    assert events(broken, running()) == [("Normal", "Recovered"), ("Normal", "SandboxReady")]
    assert events(broken, broken) == []
    assert events(running(pods=(pulling("ErrImagePull"),)), running(pods=(pulling("ImagePullBackOff"),))) == []


@pytest.mark.parametrize(("before", "after", "expected"), scene_rows(__file__, "transitions"))
def test_one_event_for_each_real_transition(before, after, expected):
    assert tuple(events(before, after)) == expected


def test_a_fault_that_is_a_book_is_clipped_to_what_the_server_takes():
    found = plan(running(progress=progress(Phase.FAILED, "TooManyFaults", message="→" * 99_999)))
    assert len(found.status["message"]) == 4096
    assert all(len(condition["message"]) <= 4096 for condition in found.status["conditions"])
    assert all(len(event.message.encode()) <= 1000 for event in found.events)


@pytest.mark.parametrize("case", FIGURES.values(), ids=FIGURES)
def test_every_figure_of_the_orchestrator_is_in_the_status_of_the_job_and_of_each_agent(case):
    job = rljob({"agents": case["agents"]} if "agents" in case else None)
    found = status(running(job=job, progress=progress(**case["progress"])))
    whole = "observedGeneration" in case["status"]
    shown = [key for key in found if key != "conditions" and (whole or key in case["status"])]
    assert {key: found[key] for key in shown} == case["status"]
    RLJobStatus.model_validate(found)


@pytest.mark.parametrize(("names", "newest", "shown"), scene_rows(__file__, "shown_versions"))
def test_the_column_version_has_the_version_of_every_policy(names, newest, shown):
    """A player of another agent's policy has no version of its own."""
    agents = [*({"name": name} for name in names), {"name": "past", "policy": {"of": names[0], "versions": "past"}}]
    job = rljob({"agents": agents[:16]})
    assert status(running(job=job, progress=progress(versions=newest))).get("versions") == shown


def test_only_moved_figures_are_not_urgent_and_tell_no_event_and_a_number_that_json_cannot_say_is_left_out():
    assert "reward" not in status(running(progress=progress(reward=float("nan"))))
    before = {key: value for key, value in status(running()).items() if value is not None}
    found = plan(running(status=before, progress=progress(tokens=5)), NOW + 9)
    assert (found.status["tokens"], found.urgent, found.events) == (5, False, ())


def test_a_job_whose_egress_the_installation_closes_waits_and_one_that_runs_goes_on_without_it():
    closed = rljob(egress=[{"cidr": "10.96.0.1/32"}, {"cidr": "0.0.0.0/0"}, {"cidr": "fd00::/8"}])
    text = "egress 10.96.0.1/32 and fd00::/8 is not open to jobs (network.jobEgress of the chart)"
    waiting = plan(new(job=closed))
    assert not [action for action in waiting.actions if isinstance(action, WriteDocument)]
    assert (waiting.status["phase"], waiting.status["reason"]) == ("Queued", "EgressNotAllowed")
    assert waiting.status["message"] == f"{text}; the job starts once it is open"
    going_on = status(running(job=closed))
    assert (going_on["phase"], going_on["reason"]) == ("Running", "EgressNotAllowed")
    assert going_on["message"] == f"{text}; the job continues without it"
