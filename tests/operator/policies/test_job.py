"""What is done about a job: every way in, every way out, nothing when nothing is to be done, and what a plan never does."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.operator import objects
from tests.operator.policies import scenes
from tests.tables import rows

from marlaas_api.kinds import ModelPool
from marlaas_api.messages import Phase
from marlaas_operator.plan import AddFinalizer, Apply, Delete, DeleteObject, Plan, RemoveFinalizer, WriteDocument
from marlaas_operator.policies.job import FINALIZER, plan_job
from marlaas_operator.snapshot import BusState, JobPool

AWAY = BusState(available=False, since=scenes.NOW - 60)
UNREAD = BusState(available=False, since=scenes.NOW - 60, synced=False)
AGENTS = [{"name": "solver"}, {"name": "judge", "poolRef": {"name": "big"}}]
TEAM = scenes.rljob({"agents": AGENTS})
SERVING = (scenes.pod("rollout"), scenes.pod("trainer"))
SPECS = {"suspend": True, "backoffLimit": 0}, {"ttlSecondsAfterFinished": 0}, {"training": {"steps": 50}}
JOBS = (None, scenes.rljob(), *map(scenes.rljob, (*SPECS, {"ttlSecondsAfterFinished": 60, **SPECS[2]})))
RUNNING, ENDED = {"phase": "Running", "reason": "Training"}, {"phase": "Failed", "finishedAt": "2020-01-01T00:00:00Z"}
STATUSES = (None, {"phase": "Queued"}, RUNNING, ENDED, ENDED | {"phase": "Succeeded", "step": 40})
EVICTED = scenes.pod(ready=False, phase="Failed", reason="Evicted", message="x exceeds y")
PODS = ((), (scenes.pod(),), (scenes.crashed(restarts=9),), (scenes.pod(ready=False, deleting=True),), (EVICTED,))
REASONS = ("Training", "WaitingForPool", "Admitted", "WaitingForSlots", "Finished")
AGO = st.sampled_from([scenes.NOW, scenes.NOW - 100])

buses = st.builds(
    BusState,
    available=st.booleans(),
    since=st.sampled_from([0.0, scenes.NOW - 5, scenes.NOW + 3600]),
    synced=st.booleans(),
    leaderless_since=st.sampled_from([None, scenes.NOW - 1, scenes.NOW - 10, scenes.NOW + 100]),
)
levels = st.builds(
    lambda phase, reason, uid, at: scenes.progress(phase, reason, uid=uid, finished_at=at if phase.final else None),
    st.sampled_from(Phase),
    st.sampled_from(REASONS),
    st.sampled_from(["u1", "old"]),
    st.sampled_from([None, scenes.NOW - 100, scenes.NOW]),
)
documents = st.builds(scenes.document, uid=st.sampled_from(["u1", "old"]), deleted=st.booleans())
deleted_at = st.sampled_from([None, None, scenes.NOW - 1, scenes.NOW - 1000])
metas = st.builds(replace, st.just(scenes.META), finalizers=st.sampled_from([(), (FINALIZER,)]), deleted_at=deleted_at)
MODELPOOLS = (None, scenes.modelpool(), scenes.modelpool(adapterSlots=1), scenes.modelpool(namespaces=["x"]))
POOLS = [JobPool("tiny", pool) for pool in MODELPOOLS]
snapshots = st.builds(
    lambda scene, job, level, unread: replace(
        scene, job=job, problem="" if job else "?", progress=level, unreadable="?" if unread and level is None else ""
    ),
    st.builds(
        replace,
        st.just(scenes.snapshot()),
        meta=metas,
        bus=buses,
        pools=st.lists(st.sampled_from(POOLS), min_size=1, max_size=2).map(tuple),
        document=st.none() | documents,
        owned=st.sampled_from([{}, scenes.owned_sandbox()]),
        pods=st.sampled_from(PODS),
        credential=st.sampled_from([None, "creds"]),
        status=st.sampled_from(STATUSES),
        first_seen_at=AGO,
        deletion_seen_at=AGO,
        refusal=st.sampled_from(["", "exceeded quota"]),
    ),
    st.sampled_from(JOBS),
    st.none() | levels,
    st.booleans(),
)


def plan(scene, now=scenes.NOW) -> Plan:
    return plan_job(scene, scenes.INSTALLATION, now)


def told(scene, now=scenes.NOW):
    """The scene after its status was written."""
    status = {**(scene.status or {}), **(plan(scene, now).status or {})}
    return replace(scene, status={key: value for key, value in status.items() if value is not None} or None)


def kinds(actions):
    return [action.manifest["kind"] if isinstance(action, Apply) else type(action).__name__ for action in actions]


def test_a_new_job_gets_its_finalizer_then_its_document_and_no_status_before_the_orchestrator_had_its_say():
    found = plan(scenes.new(meta=replace(scenes.META, finalizers=())))
    assert found.actions == (AddFinalizer(FINALIZER), WriteDocument(scenes.document(), None))
    assert (found.status, found.requeue_s) == (None, 2.0)
    later = plan(scenes.new(document=scenes.document()), scenes.NOW + 2).status
    assert (later["phase"], later["reason"]) == ("Queued", "WaitingForOrchestrator")


def test_a_queued_job_owns_nothing_and_costs_one_status_patch_and_no_event():
    found = plan(scenes.new(document=scenes.document(), progress=scenes.queued()))
    assert found.actions == ()
    assert (found.status["phase"], found.status["reason"]) == ("Queued", "WaitingForSlots")
    assert found.events == ()
    assert plan(told(scenes.new(document=scenes.document(), progress=scenes.queued()))).empty


def test_the_document_says_the_generation_the_tenant_and_the_weight():
    owner = scenes.tenant("research", "team-a", weight=3)
    [write] = plan(scenes.new(meta=replace(scenes.META, generation=4), tenant=owner)).actions
    assert (write.document.generation, write.document.tenant, write.document.tenant_weight) == (4, "research", 3)


@pytest.mark.parametrize(("fields", "reason", "words"), scenes.scene_rows(__file__, "not_handed_over"))
def test_what_cannot_be_handed_over_gets_no_document_and_is_told_at_once(fields, reason, words):
    phase = "Failed" if reason == "Unsupported" else "Queued"
    scene = scenes.new(**fields)
    found = plan(scene)
    assert not any(isinstance(action, WriteDocument) and action.document.uid == "u1" for action in found.actions)
    assert (found.status["phase"], found.status["reason"]) == (phase, reason)
    assert words in found.status["message"]
    assert plan(told(scene)).status is None


@pytest.mark.parametrize(("job", "small", "large"), rows(__file__, "early"))
def test_a_job_that_came_a_moment_before_its_pools_update_is_handed_over_after_it(job, small, large):
    first = scenes.modelpool(**small) if small is not None else None
    early = told(scenes.new(job=scenes.rljob(job), on={"pool": first}))
    assert early.status["phase"] == "Queued"
    assert kinds(plan(scenes.repooled(early, pool=scenes.modelpool(**large))).actions) == ["WriteDocument"]


@pytest.mark.parametrize("pool", [scenes.modelpool(namespaces=["team-b"]), scenes.modelpool(adapterSlots=1), None])
def test_a_running_job_is_not_failed_by_a_pool_that_changes_or_goes_nor_while_the_bus_cannot_be_read(pool):
    assert plan(told(scenes.running(on={"pool": pool}))).empty
    found = plan(replace(scenes.repooled(told(scenes.running()), pool=pool), bus=UNREAD, document=None, progress=None))
    assert (found.actions, found.status["phase"], found.status["reason"]) == ((), "Running", "BusUnavailable")


def test_what_a_newer_orchestrator_says_is_unknown_and_nothing_is_made_removed_or_told_on_its_account():
    unread = replace(told(scenes.running()), progress=None, unreadable="schema version 2")
    for one in (unread, scenes.repooled(unread, pool=scenes.modelpool(adapterSlots=1)), replace(unread, document=None)):
        found = plan(one)
        assert (found.actions, found.status["phase"], found.status["reason"]) == ((), "Running", "Unreadable")
        assert found.status["conditions"] == one.status["conditions"]


def test_a_pool_that_is_gone_by_force_or_cannot_be_read_takes_no_lock_off_the_sandboxes():
    pool = scenes.modelpool(sandbox={"runtimeClassName": "gvisor", "nodeSelector": {"sandboxes": "only"}})
    locked = plan(scenes.snapshot(on={"pool": pool})).actions[-1].manifest["spec"]["template"]["spec"]
    assert (locked["runtimeClassName"], locked["nodeSelector"]) == ("gvisor", {"sandboxes": "only"})
    assert plan(scenes.snapshot(on={"pool": None})).actions == ()


def test_an_earlier_job_of_the_same_name_is_forgotten_before_this_one_is_handed_over():
    left = scenes.document(uid="old")
    assert plan(scenes.new(document=left)).actions == (WriteDocument(left.model_copy(update={"deleted": True}), left),)
    assert plan(scenes.new(document=left.model_copy(update={"deleted": True}))).actions == ()


@pytest.mark.parametrize(("scene", "acts", "requeue_s"), scenes.scene_rows(__file__, "admitted"))
def test_an_admitted_job_whose_status_is_written_gets_what_it_lacks_and_nothing_else(scene, acts, requeue_s):
    found = plan(told(scene))
    assert tuple(kinds(found.actions)) == acts
    assert acts or found == Plan(requeue_s=requeue_s)


def test_what_an_earlier_job_of_this_name_has_left_goes_first():
    owned = scenes.owned_sandbox()
    owned["Deployment", scenes.SANDBOX]["metadata"]["ownerReferences"][0] |= {"uid": "old"}
    assert plan(told(scenes.running(owned=owned))).actions == (Delete("Deployment", "team-a", scenes.SANDBOX, "o1"),)


def test_a_bus_that_is_away_is_told_by_a_running_job_once_it_lasts_and_nothing_is_removed():
    found = plan(scenes.running(bus=AWAY))
    assert (found.actions, found.status["phase"], found.status["reason"]) == ((), "Running", "BusUnavailable")
    assert plan(told(scenes.running(bus=BusState(available=False, since=scenes.NOW - 1)))) == Plan(requeue_s=9.0)
    waits = scenes.new(document=scenes.document(), progress=scenes.queued(), bus=AWAY)
    assert plan(told(waits)).empty, "a queued job does not mind"


@pytest.mark.parametrize("phase", [Phase.SUCCEEDED, Phase.FAILED])
def test_a_job_that_has_ended_loses_its_sandbox_policy_and_account_last(phase):
    ended = told(scenes.running(progress=scenes.progress(phase, "Finished", finished_at=scenes.NOW)))
    first = plan(ended).actions
    assert first == (Delete("Deployment", "team-a", scenes.SANDBOX, "o1"),)
    draining = replace(ended, owned={k: b for k, b in ended.owned.items() if k[0] != "Deployment"})
    assert plan(draining).actions == (), "a pod still runs"
    gone = plan(replace(draining, pods=())).actions
    assert [action.kind for action in gone] == ["Secret", "NetworkPolicy", "ServiceAccount"]
    assert plan(replace(ended, owned={}, pods=())).empty


def big(**spec):
    return ModelPool.model_validate(objects.pool("big", **spec))


def both(second, first=None):
    return first or JobPool("tiny", scenes.modelpool(), pods=SERVING), second


@pytest.mark.parametrize(("spec", "problem", "reason", "message"), rows(__file__, "two_pools"))
def test_a_job_waits_until_all_its_pools_exist_and_allow_it(spec, problem, reason, message):
    """spec: of the second pool; without it, `problem` is why it cannot be read, and the first pool does not exist."""
    found = both(JobPool("big", problem=problem), JobPool("tiny")) if problem else both(JobPool("big", big(**spec)))
    scene = scenes.new(job=TEAM, pools=found)
    told = plan(scene)
    assert not any(isinstance(action, WriteDocument) for action in told.actions)
    assert (told.status["phase"], told.status["reason"], told.status["message"]) == ("Queued", reason, message)
    ready = plan(replace(scene, pools=both(JobPool("big", big()))))
    assert any(isinstance(action, WriteDocument) for action in ready.actions)


def test_workers_of_a_pool_without_agents_of_the_job_do_not_matter_and_its_sandbox_settings_do():
    job = scenes.rljob({"agents": [AGENTS[1]]})
    pools = both(JobPool("big", big(), pods=SERVING), JobPool("tiny", scenes.modelpool()))
    scene = scenes.running(job=job, owned={}, pools=pools)
    assert plan(scene).status["reason"] == "Training"
    pods = scenes.crashed(component="rollout"), scenes.pod("trainer")
    crashing = scenes.running(job=TEAM, pools=both(JobPool("big", big(), pods=pods)))
    assert plan(crashing).status["message"] == "rollout-0 of pool big: boom"
    bounded = scenes.modelpool(sandbox={"runtimeClassName": "gvisor"})
    scene = replace(scene, pools=both(scene.pools[1], JobPool("tiny", bounded)))
    assert plan(scene).actions[-1].manifest["spec"]["template"]["spec"]["runtimeClassName"] == "gvisor"


@settings(deadline=None, max_examples=400, suppress_health_check=list(HealthCheck))
@given(scene=snapshots)
def test_no_plan_runs_hot_says_two_things_in_turn_or_acts_on_what_is_not_known(scene):
    found = plan(scene)
    assert found.requeue_s is None or found.requeue_s > 0 or not found.empty, "nothing to do, and at once again"
    if any(isinstance(action, RemoveFinalizer) for action in found.actions):
        assert (len(found.actions), scene.meta.deleted_at is None) == (1, False)
    if scene.meta.deleted_at is None and scene.own_progress is None and not scene.progress_known:
        assert not any(isinstance(action, Delete | DeleteObject) for action in found.actions)
        assert scene.status is None or found.status is None or found.status["phase"] == scene.status["phase"]
    assert plan(told(scene)).status is None
