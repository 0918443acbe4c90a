"""What is done about a pool, and what it says of itself."""

from dataclasses import replace

import pytest
from tests.operator.policies import scenes
from tests.tables import data, rows

from marlaas_api.messages import Phase
from marlaas_operator.manifests.pool import Pool, role_objects, shared_objects
from marlaas_operator.plan import AddFinalizer, Apply, Delete, Plan, RemoveFinalizer
from marlaas_operator.policies.pool import DRAIN_S, FINALIZER, plan_pool

SERVING = (scenes.pod("rollout"), scenes.pod("trainer"))


def plan(scene, now=scenes.NOW) -> Plan:
    return plan_pool(scene, scenes.INSTALLATION, now)


def settled(**fields):
    """A pool whose objects are all there and whose status is written."""
    scene = scenes.pool_snapshot(**{"pods": SERVING, "owned": owned(fields.get("pool")), **fields})
    return replace(scene, status=plan(scene).status)


def owned(pool=None):
    made = Pool(scenes.pool_snapshot().meta, pool or scenes.modelpool(), scenes.pool_snapshot().credentials)
    roles = [manifest for role in ("rollout", "trainer") for manifest in role_objects(made, scenes.INSTALLATION, role)]
    made = [*shared_objects(made, scenes.INSTALLATION), *roles]
    return {scenes.key_of(manifest): scenes.stored(manifest) for manifest in made}


def deleted(scene, ago_s=1.0):
    return replace(scene, meta=replace(scene.meta, deleted_at=scenes.NOW - ago_s))


def applied(found):
    return [scenes.key_of(action.manifest) for action in found.actions if isinstance(action, Apply)]


def conditions(found):
    return {c["type"]: (c["status"], c["reason"]) for c in found.status["conditions"]}


def test_a_new_pool_gets_its_finalizer_and_its_workers_after_what_guards_them():
    scene = scenes.pool_snapshot()
    found = plan(replace(scene, meta=replace(scene.meta, finalizers=())))
    assert found.actions[0] == AddFinalizer(FINALIZER)
    assert [f"{kind} {name}" for kind, name in applied(found)] == data(__file__, "applied_of_a_pool")


def test_a_pool_in_a_steady_state_needs_nothing_and_workers_wait_for_their_credentials():
    found = plan(scenes.pool_snapshot(credentials={}))
    assert applied(found) == [("ServiceAccount", "tiny-workers"), ("ConfigMap", "tiny-pool")]
    assert found.requeue_s == 15.0
    assert plan(settled()) == Plan(requeue_s=600.0)


@pytest.mark.parametrize("key", sorted(owned()))
def test_an_owned_object_that_was_deleted_comes_back(key):
    scene = settled()
    found = plan(replace(scene, owned={k: body for k, body in scene.owned.items() if k != key}))
    assert key in applied(found)
    assert len(found.actions) == (2 if key[0] == "StatefulSet" else 1), "its Secret comes along"


@pytest.mark.parametrize(("change", "roles"), rows(__file__, "changes"))
def test_a_change_reaches_those_whom_it_concerns_and_restarts_nobody_else(change, roles):
    assert {name for _, name in applied(plan(replace(settled(), pool=scenes.modelpool(**change))))} == set(roles)


def test_the_status_says_who_serves_and_what_is_taken():
    jobs = (scenes.load("a"), scenes.load("b", Phase.QUEUED), scenes.load("c", Phase.SUCCEEDED))
    found = plan(scenes.pool_snapshot(pods=SERVING, jobs=jobs)).status
    assert {key: value for key, value in found.items() if key != "conditions"} == data(__file__, "pool_status")


def test_before_the_bus_was_read_nothing_new_is_said_of_what_jobs_hold():
    told = settled(jobs=(scenes.load("a"),))
    jobs = (scenes.load("a", Phase.QUEUED, published=False),)
    unread = replace(told, bus=replace(scenes.AWAKE, synced=False), jobs=jobs)
    assert (told.status["jobs"], told.status["freeSlots"]) == (1, 13)
    assert plan(unread).status is None
    assert "jobs" not in plan(replace(unread, status=None)).status


@pytest.mark.parametrize(("fields", "rollout", "trainer", "ready"), scenes.scene_rows(__file__, "pool_conditions"))
def test_conditions_say_which_role_does_not_serve_and_why(fields, rollout, trainer, ready):
    found = conditions(plan(scenes.pool_snapshot(**fields)))
    reasons = {type_: reason for type_, (_, reason) in found.items()}
    assert reasons == {"RolloutReady": rollout, "TrainerReady": trainer, "Ready": ready}
    assert all((status == "True") == reason.endswith("Ready") for status, reason in found.values())


def test_the_time_until_all_workers_of_a_role_were_ready_is_kept_for_its_next_start():
    began, gone = replace(settled(), status=None, pods=(scenes.pod("trainer"),)), (scenes.pod("trainer"),)
    first = plan(began, scenes.NOW).status
    assert (first["rollout"], first["trainer"]) == ({"replicas": 1, "ready": 0}, {"replicas": 1, "ready": 1})
    ready = plan(replace(began, status=first, pods=SERVING), scenes.NOW + 48.04).status
    assert (ready["rollout"]["startSeconds"], ready["trainer"]) == (48.0, first["trainer"])
    again = plan(replace(began, status=ready, pods=gone), scenes.NOW + 900.0).status
    assert again["rollout"] == {"replicas": 1, "ready": 0, "startSeconds": 48.0}
    assert plan(replace(began, status=again, pods=gone), scenes.NOW + 999.0).status is None


def test_a_pool_that_does_not_parse_says_so_keeps_what_it_has_and_can_be_deleted():
    unread = {"pool": None, "problem": "spec.model: required"}
    found = plan(replace(settled(), **unread))
    assert (found.actions, conditions(found)["Ready"]) == ((), ("False", "InvalidSpec"))
    used = plan(deleted(replace(settled(jobs=(scenes.load(),)), **unread)))
    assert (used.actions, conditions(used)["Deleting"]) == ((), ("False", "InUse"))
    scene = deleted(replace(settled(), **unread))
    scene = replace(scene, status=plan(scene).status)
    assert [action.kind for action in plan(scene).actions] == ["StatefulSet", "StatefulSet"]
    assert plan(replace(scene, owned={}, pods=())).actions == (RemoveFinalizer(FINALIZER),)


def test_a_deleted_pool_serves_on_while_jobs_use_it_and_names_them():
    jobs = tuple(scenes.load(f"j{number}") for number in range(7))
    found = plan(deleted(settled(jobs=jobs)))
    assert found.actions == ()
    assert len(applied(plan(deleted(replace(settled(jobs=jobs), owned={}))))) == 12, "drift is put right meanwhile"
    [told] = [c for c in found.status["conditions"] if c["type"] == "Deleting"]
    assert (told["status"], told["reason"]) == ("False", "InUse")
    assert "team-a/j0, team-a/j1, team-a/j2, team-a/j3, team-a/j4 and 2 more" in told["message"]
    assert ("Warning", "InUse") in [(event.type, event.reason) for event in found.events]


def stopping(**fields):
    """A deleted pool that no job holds, and whose status says so."""
    scene = deleted(settled(**fields))
    return replace(scene, status=plan(scene).status or scene.status)


WAITS = scenes.load(phase=Phase.QUEUED, published=False)


@pytest.mark.parametrize(
    ("job", "is_read", "goes"),
    [(scenes.load(phase=Phase.FAILED), True, True), (WAITS, True, True), (WAITS, False, False)],
)
def test_jobs_that_have_ended_or_never_begun_do_not_hold_a_pool_once_the_bus_was_read(job, is_read, goes):
    scene = stopping(jobs=(job,), bus=replace(scenes.AWAKE, synced=is_read))
    assert (Delete("StatefulSet", "marlaas-system", "tiny-rollout", "o1") in plan(scene).actions) is goes


def test_of_a_deleted_pool_that_is_told_first_the_workers_go_then_what_guarded_them_then_the_pool():
    begun = deleted(settled())
    told = plan(begun)
    assert (told.actions, told.requeue_s, conditions(told)["Deleting"]) == ((), 1.0, ("True", "Deleting"))
    assert plan(replace(begun, meta=replace(begun.meta, finalizers=()))) == Plan(), "without our finalizer"
    scene = stopping()
    first = plan(scene).actions
    assert [a.kind for a in first] == ["StatefulSet", "StatefulSet"]
    draining = replace(scene, owned={k: b for k, b in scene.owned.items() if k[0] != "StatefulSet"})
    assert plan(draining).actions == ()
    last = plan(replace(draining, pods=())).actions
    guards = {"Secret", "NetworkPolicy", "Service", "PodDisruptionBudget", "ConfigMap", "ServiceAccount"}
    assert {a.kind for a in last} == guards
    assert last[-1].kind == "ServiceAccount"
    assert plan(replace(scene, owned={}, pods=())).actions == (RemoveFinalizer(FINALIZER),)


def test_neither_a_pod_that_never_ends_nor_a_refused_action_holds_the_pool_for_ever():
    assert RemoveFinalizer(FINALIZER) not in plan(stopping(), scenes.NOW + DRAIN_S - 1).actions
    assert plan(stopping(), scenes.NOW + DRAIN_S).actions == (RemoveFinalizer(FINALIZER),), "alone"
