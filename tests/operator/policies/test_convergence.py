"""Level-based: whatever was done before and wherever the operator died, the same end is reached, and then there is nothing to do."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.operator.policies.scenes import INSTALLATION, rljob
from tests.operator.policies.world import World

from marlaas_operator.policies.job import plan_job

Step = Callable[[World], None]


def drift(world: World) -> None:
    """Somebody deletes what the operator owns and edits what is left."""
    for key in list(world.objects)[::2]:
        if key[0] != "Secret":
            del world.objects[key]
    for body in world.objects.values():
        body["metadata"]["labels"] = {}


def forget_status(world: World) -> None:
    world.status = None


def suspend(world: World) -> None:
    world.job = rljob({"suspend": True})
    world.progress = None


STORIES: dict[str, tuple[Step, ...]] = {
    "queued": (),
    "admitted": (World.admit,),
    "ended": (World.admit, World.end),
    "deleted while queued": (World.delete,),
    "deleted while running": (World.admit, World.delete),
    "deleted after its end": (World.admit, World.end, World.delete),
    "drifted": (World.admit, drift),
    "drifted and ended": (World.admit, drift, World.end),
    "status lost": (World.admit, forget_status),
    "admitted twice": (World.admit, World.end, World.admit),
    "suspended": (World.admit, suspend),
}


def played(story: str, crashes: list[int | None]) -> World:
    """The end of a story in which the operator dies after so many actions of its first plans."""
    world, pending = World(), list(crashes)
    world.settle(lambda: pending.pop(0) if pending else None)
    for step in STORIES[story]:
        step(world)
        world.settle(lambda: pending.pop(0) if pending else None)
    return world


@pytest.mark.parametrize("story", STORIES)
def test_once_settled_a_plan_is_empty_and_stays_so(story):
    world = played(story, [])
    for _ in range(3):
        if world.meta is not None:
            world.now += 1
            assert plan_job(world.snapshot(), INSTALLATION, world.now).empty


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(story=st.sampled_from(sorted(STORIES)), crashes=st.lists(st.none() | st.integers(0, 5), max_size=12))
def test_an_operator_that_dies_between_any_two_actions_reaches_the_same_end(story, crashes):
    world = played(story, crashes)
    assert world.result() == played(story, []).result()
    assert world.unguarded == [], "a sandbox without policy, account or credential"


@pytest.mark.parametrize("story", ["deleted while queued", "deleted while running", "deleted after its end"])
def test_a_deleted_job_leaves_nothing(story):
    world = played(story, [0, 1, 0, 2, 1, 1])
    assert (world.meta, world.objects, world.document, world.progress) == (None, {}, None, None)


def test_a_job_that_has_ended_owns_nothing_but_its_document():
    world = played("ended", [1, 1, 1, 1])
    assert world.objects == {}
    assert world.document is not None


def test_a_whole_life_is_told_once():
    world = played("deleted after its end", [])
    assert world.events == ["Admitted", "SandboxReady", "Finished", "Deleting"]


def test_an_operator_that_starts_again_tells_and_writes_nothing():
    world = played("admitted", [])
    told = list(world.events)
    world.settle()
    assert world.events == told
