"""Whatever is observed of a job, in whatever combination: what a plan never does."""

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.operator.policies.scenes import META, NOW, crashed, document, modelpool, owned_sandbox, pod, progress, rljob
from tests.operator.policies.scenes import snapshot as running
from tests.operator.policies.test_job import plan

from marlaas_api.messages import Phase
from marlaas_operator.plan import Delete, DeleteObject, RemoveFinalizer
from marlaas_operator.policies.job import FINALIZER
from marlaas_operator.snapshot import BusState, JobPool

JOBS = (
    None,
    rljob(),
    rljob({"suspend": True, "backoffLimit": 0}),
    rljob({"ttlSecondsAfterFinished": 0}),
    rljob({"ttlSecondsAfterFinished": 60, "training": {"steps": 50}}),
)
STATUSES = (
    None,
    {"phase": "Queued"},
    {"phase": "Running", "reason": "Training"},
    {"phase": "Failed", "finishedAt": "2020-01-01T00:00:00Z"},
    {"phase": "Succeeded", "step": 40, "finishedAt": "2027-01-15T08:00:00Z"},
)
EVICTED = pod(ready=False, phase="Failed", reason="Evicted", message="x exceeds y")
PODS = ((), (pod(),), (crashed(restarts=9),), (pod(ready=False, deleting=True),), (EVICTED,))
REASONS = ("Training", "WaitingForPool", "Admitted", "WaitingForSlots", "Finished")
AGO = st.sampled_from([NOW, NOW - 100])

buses = st.builds(
    BusState,
    available=st.booleans(),
    since=st.sampled_from([0.0, NOW - 5, NOW + 3600]),
    synced=st.booleans(),
    leaderless_since=st.sampled_from([None, NOW - 1, NOW - 10, NOW + 100]),
)
levels = st.builds(
    lambda phase, reason, uid, at: progress(phase, reason, uid=uid, finished_at=at if phase.final else None),
    st.sampled_from(Phase),
    st.sampled_from(REASONS),
    st.sampled_from(["u1", "old"]),
    st.sampled_from([None, NOW - 100, NOW]),
)
documents = st.builds(document, uid=st.sampled_from(["u1", "old"]), deleted=st.booleans())
metas = st.builds(
    lambda finalizers, at: replace(META, finalizers=finalizers, deleted_at=at),
    st.sampled_from([(), (FINALIZER,)]),
    st.sampled_from([None, None, NOW - 1, NOW - 1000]),
)
POOLS = [JobPool("tiny", pool) for pool in (None, modelpool(), modelpool(adapterSlots=1), modelpool(namespaces=["x"]))]
snapshots = st.builds(
    lambda scene, job, level, unread: replace(
        scene, job=job, problem="" if job else "?", progress=level, unreadable="?" if unread and level is None else ""
    ),
    st.builds(
        replace,
        st.just(running()),
        meta=metas,
        bus=buses,
        pools=st.lists(st.sampled_from(POOLS), min_size=1, max_size=2).map(tuple),
        document=st.none() | documents,
        owned=st.sampled_from([{}, owned_sandbox()]),
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
    if found.status is not None:
        told = {key: value for key, value in {**(scene.status or {}), **found.status}.items() if value is not None}
        assert plan(replace(scene, status=told)).status is None
