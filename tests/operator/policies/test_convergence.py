"""Level-based: whatever was done before and wherever the operator died, the same end is reached, and then there is nothing to do."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.operator.policies.harness import PolicyHarness
from tests.operator.policies.scenes import INSTALLATION, rljob

from marlaas_operator.policies.job import plan_job

Step = Callable[[PolicyHarness], None]


def drift(harness: PolicyHarness) -> None:
    """Somebody deletes what the operator owns and edits what is left."""
    for key in list(harness.objects)[::2]:
        if key[0] != "Secret":
            del harness.objects[key]
    for body in harness.objects.values():
        body["metadata"]["labels"] = {}


def forget_status(harness: PolicyHarness) -> None:
    harness.status = None


def suspend(harness: PolicyHarness) -> None:
    harness.job = rljob({"suspend": True})
    harness.progress = None


STORIES: dict[str, tuple[Step, ...]] = {
    "queued": (),
    "admitted": (PolicyHarness.admit,),
    "ended": (PolicyHarness.admit, PolicyHarness.end),
    "deleted while queued": (PolicyHarness.delete,),
    "deleted while running": (PolicyHarness.admit, PolicyHarness.delete),
    "deleted after its end": (PolicyHarness.admit, PolicyHarness.end, PolicyHarness.delete),
    "drifted": (PolicyHarness.admit, drift),
    "drifted and ended": (PolicyHarness.admit, drift, PolicyHarness.end),
    "status lost": (PolicyHarness.admit, forget_status),
    "admitted twice": (PolicyHarness.admit, PolicyHarness.end, PolicyHarness.admit),
    "suspended": (PolicyHarness.admit, suspend),
}


def played(story: str, crashes: list[int | None]) -> PolicyHarness:
    """The end of a story in which the operator dies after so many actions of its first plans."""
    harness, pending = PolicyHarness(), list(crashes)
    harness.settle(lambda: pending.pop(0) if pending else None)
    for step in STORIES[story]:
        step(harness)
        harness.settle(lambda: pending.pop(0) if pending else None)
    return harness


@pytest.mark.parametrize("story", STORIES)
def test_once_settled_a_plan_is_empty_and_stays_so(story):
    harness = played(story, [])
    for _ in range(3):
        if harness.meta is not None:
            harness.now += 1
            assert plan_job(harness.snapshot(), INSTALLATION, harness.now).empty


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(story=st.sampled_from(sorted(STORIES)), crashes=st.lists(st.none() | st.integers(0, 5), max_size=12))
def test_an_operator_that_dies_between_any_two_actions_reaches_the_same_end(story, crashes):
    harness = played(story, crashes)
    assert harness.result() == played(story, []).result()
    assert harness.unguarded == [], "a sandbox without policy, account or credential"


@pytest.mark.parametrize("story", ["deleted while queued", "deleted while running", "deleted after its end"])
def test_a_deleted_job_leaves_nothing(story):
    harness = played(story, [0, 1, 0, 2, 1, 1])
    assert (harness.meta, harness.objects, harness.document, harness.progress) == (None, {}, None, None)


def test_a_job_that_has_ended_owns_nothing_but_its_document():
    harness = played("ended", [1, 1, 1, 1])
    assert harness.objects == {}
    assert harness.document is not None


def test_a_whole_life_is_told_once():
    harness = played("deleted after its end", [])
    assert harness.events == ["Admitted", "SandboxReady", "Finished", "Deleting"]


def test_an_operator_that_starts_again_tells_and_writes_nothing():
    harness = played("admitted", [])
    told = list(harness.events)
    harness.settle()
    assert harness.events == told
