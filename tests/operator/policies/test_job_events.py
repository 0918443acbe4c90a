"""The events of a job: one per transition."""

from dataclasses import replace

import pytest
from tests.operator.policies.scenes import (
    INSTALLATION,
    META,
    NOW,
    container,
    crashed,
    document,
    modelpool,
    new,
    pod,
    progress,
    queued,
    running,
)

from marlaas_api.messages import Phase
from marlaas_operator.policies.job import plan_job


def status(scene, now=NOW):
    return plan_job(scene, INSTALLATION, now).status


def events(before, scene, now=NOW):
    """Events when the scene comes after another whose status was written."""
    stored = {key: value for key, value in status(before).items() if value is not None}
    return [(event.type, event.reason) for event in plan_job(replace(scene, status=stored), INSTALLATION, now).events]


def pulling(words):
    return pod("sandbox", container(waiting=words, message="no such image", image="x:1"), ready=False)


PULLING = pulling("ErrImagePull")


def test_a_fault_begins_and_ends_with_one_event_each_and_goes_away_by_itself():
    broken = running(pods=(crashed(),))
    assert events(running(), broken) == [("Warning", "ContainerCrashing")]
    assert events(broken, running()) == [("Normal", "Recovered"), ("Normal", "SandboxReady")]
    assert events(broken, broken) == []


@pytest.mark.parametrize("other", ["ErrImagePull", "ImagePullBackOff"])
def test_an_image_that_is_tried_again_and_again_is_told_once(other):
    assert events(running(pods=(PULLING,)), running(pods=(pulling(other),))) == []


QUEUED = new(document=document(), progress=queued())
SUCCEEDED = running(progress=progress(Phase.SUCCEEDED, "Finished"))
FAILED = running(progress=progress(Phase.FAILED, "TooManyFaults", message="x"))
SUSPENDED = running(progress=progress(Phase.SUSPENDED, "Suspended"))


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (QUEUED, running(pods=()), [("Normal", "Admitted")]),
        (running(pods=()), running(), [("Normal", "SandboxReady")]),
        (running(), SUCCEEDED, [("Normal", "Finished")]),
        (running(), FAILED, [("Warning", "TooManyFaults")]),
        (running(pods=(crashed(),)), FAILED, [("Warning", "TooManyFaults")]),
        (running(), SUSPENDED, [("Normal", "Suspended")]),
        (QUEUED, SUSPENDED, [("Normal", "Suspended")]),
        (SUSPENDED, QUEUED, [("Normal", "WaitingForSlots")]),
        (SUSPENDED, running(pods=()), [("Normal", "Admitted")]),
        (running(), running(meta=replace(META, deleted_at=NOW)), [("Normal", "Deleting")]),
        (QUEUED, new(document=document(), progress=queued("WaitingForPool")), []),
    ],
)
def test_one_event_for_each_real_transition(before, after, expected):
    assert events(before, after) == expected


@pytest.mark.parametrize(
    ("pool", "reason"), [({"adapterSlots": 1}, "NeverFits"), ({"namespaces": ["team-b"]}, "NamespaceNotAllowed")]
)
def test_a_job_that_does_not_fit_its_pool_is_told_once_with_a_warning_and_its_condition_says_so(pool, reason):
    misfit = new(pool=modelpool(**pool))
    found = plan_job(misfit, INSTALLATION, NOW)
    assert [(event.type, event.reason) for event in found.events] == [("Warning", reason)]
    [admitted] = [one for one in found.status["conditions"] if one["type"] == "Admitted"]
    assert (admitted["status"], admitted["reason"]) == ("False", reason)
    assert "The job starts once the pool is changed" in admitted["message"]
    assert events(misfit, misfit) == []


def test_a_pool_that_is_not_there_is_told_once():
    found = plan_job(new(pool=None), INSTALLATION, NOW)
    assert [(event.type, event.reason) for event in found.events] == [("Warning", "PoolNotFound")]
    assert events(new(pool=None), new(pool=None)) == []


def test_a_fault_that_is_a_book_is_clipped_to_what_the_server_takes():
    found = plan_job(running(progress=progress(Phase.FAILED, "TooManyFaults", message="→" * 99_999)), INSTALLATION, NOW)
    assert len(found.status["message"]) == 4096
    assert all(len(condition["message"]) <= 4096 for condition in found.status["conditions"])
    assert all(len(event.message.encode()) <= 1000 for event in found.events)
