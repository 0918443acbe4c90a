"""A pool's whole life, with an operator that is killed between any two actions: the end is the same."""

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.operator.policies.scenes import key_of, pod, pool_snapshot, stored
from tests.operator.policies.test_pool import deleted, plan

from marlaas_operator.plan import AddFinalizer, Apply, Delete, RemoveFinalizer


def lived(crashes):
    """A pool's life, from its creation over its workers' death to its end, with the operator dying after so many actions of its first
    plans; what existed before its deletion, and what at the end."""
    scene, pending = pool_snapshot(meta=replace(pool_snapshot().meta, finalizers=())), list(crashes)
    scene = settle(scene, pending)
    before = {key: body.get("spec") for key, body in scene.owned.items()}
    scene = settle(replace(scene, owned={k: b for k, b in scene.owned.items() if k[0] != "StatefulSet"}), pending)
    scene = settle(deleted(scene), pending)
    return before, scene.owned, scene.meta.finalizers, scene.pods


def settle(scene, pending):
    for _ in range(40):
        found = plan(scene)
        crash = pending.pop(0) if pending else None
        for action in found.actions[:crash]:
            scene = after(scene, action)
        sets = {name.removeprefix("tiny-") for kind, name in scene.owned if kind == "StatefulSet"}
        scene = replace(scene, pods=tuple(pod(role) for role in sorted(sets)))
        if crash is None and found.status is not None:
            scene = replace(scene, status={k: v for k, v in found.status.items() if v is not None})
        if found.empty and crash is None:
            return scene
    raise AssertionError(f"it never comes to rest: {found}")


def after(scene, action):
    """The scene after one action; Secrets are not seen."""
    objects = dict(scene.owned)
    match action:
        case Apply(manifest) if manifest["kind"] != "Secret":
            objects[key_of(manifest)] = stored(manifest)
        case Delete(kind, _, name):
            objects.pop((kind, name), None)
        case AddFinalizer(finalizer):
            return replace(scene, meta=replace(scene.meta, finalizers=(finalizer,)))
        case RemoveFinalizer():
            return replace(scene, meta=replace(scene.meta, finalizers=()))
    return replace(scene, owned=objects)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(crashes=st.lists(st.none() | st.integers(0, 12), max_size=10))
def test_an_operator_that_dies_between_any_two_actions_makes_and_removes_the_same_pool(crashes):
    assert lived(crashes) == lived([])
    assert lived([])[1:] == ({}, (), ())
