"""The object cache: never older than an earlier observation, with objects by owner."""

import kopf
from tests.operator import objects

import marlaas_operator.handlers  # noqa: F401 - they register themselves
from marlaas_operator.cluster import Body, Target
from marlaas_operator.cluster.resources import KINDS, MODELPOOLS, OWNED, PODS, RLJOBS, TENANTS, target_of
from marlaas_operator.object_cache import ObjectCache, after_bus_change, after_change

JOB = Target(RLJOBS, "team-a", "one")
POOL = Target(MODELPOOLS, "", "tiny")
BOTH = (Target(TENANTS, "", "a"), Target(TENANTS, "", "b"))


def body(target: Target, version: int, **more: object) -> Body:
    names = target.resource.api_version, target.resource.kind, target.namespace, target.name
    metadata: Body = {"uid": f"uid-{target.name}", "resourceVersion": str(version), "generation": 1}
    metadata.update(more.pop("metadata", {}))  # type: ignore[call-overload]
    return {**objects.body(*names, **metadata), "spec": {}, **more}


def a_job(version: int, **metadata: object) -> Body:
    return body(JOB, version, spec={"poolRef": {"name": "tiny"}}, metadata=metadata)


def remembered(*bodies: Body) -> ObjectCache:
    cache = ObjectCache("marlaas-system")
    for one in bodies:
        cache.see(one)
    return cache


def test_an_object_is_lost_only_as_the_one_that_it_was():
    cache = remembered(a_job(10))
    cache.lose(JOB, "another uid")
    assert cache.get(JOB) is not None
    cache.lose(JOB, "uid-one")
    assert cache.get(JOB) is None
    assert cache.group(("jobs of pool", "", "tiny")) == []


def test_a_list_drops_what_was_known_before_it_was_asked_for_and_is_not_in_it():
    cache = remembered(a_job(10))
    known = cache.known(RLJOBS)
    newer = Target(RLJOBS, "team-a", "two")
    cache.see(body(newer, 12, spec={"poolRef": {"name": "tiny"}}))
    cache.replace([], known)
    assert cache.targets(RLJOBS) == [newer]


def of_two_tenants() -> ObjectCache:
    tenants = (body(target, 1, spec={"namespaces": [f"team-{target.name}"]}) for target in BOTH)
    return remembered(a_job(10), *tenants)


def test_a_new_phase_queues_the_pool_and_the_tenant_that_count_the_job_whoever_reports_it():
    queued: list[Target] = []
    cache = of_two_tenants()
    cache.enqueue = lambda target, delay_s: queued.append(target)
    cache.see({**a_job(11), "status": {"phase": "Queued"}}, own=True)
    assert queued == [POOL, BOTH[0]]
    cache.see({**a_job(12), "status": {"phase": "Running"}})
    assert queued[2:] == [JOB, POOL, BOTH[0]]


def test_a_new_status_concerns_the_object_alone_and_a_new_spec_those_that_count_it():
    cache = of_two_tenants()

    def concerned(target: Target, before: Body | None, after: Body) -> set[Target]:
        return {other for other, _ in after_change(cache, target, before, after)}

    assert concerned(JOB, a_job(10), {**a_job(11), "status": {"phase": "Queued"}}) == {JOB}
    assert concerned(JOB, a_job(10), a_job(12, generation=2)) == {JOB, POOL, BOTH[0]}
    pool, reported = body(POOL, 1), body(POOL, 2, status={"jobs": 1})
    assert concerned(POOL, None, pool) == {POOL, JOB, *BOTH}
    assert concerned(POOL, pool, reported) == {POOL}


def test_a_pod_concerns_whose_it_is_when_it_says_something_new():
    cache = remembered(a_job(10))
    pod = Target(PODS, "marlaas-system", "tiny-rollout-0")
    before = body(pod, 1, metadata={"labels": {"marlaas.dev/pool": "tiny"}})
    touched = body(pod, 2, metadata={"labels": {"marlaas.dev/pool": "tiny"}, "annotations": {"x": "y"}})
    ready = {**touched, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    assert list(after_change(cache, pod, before, touched)) == []
    assert {target for target, _ in after_change(cache, pod, touched, ready)} == {POOL, JOB}


def test_progress_concerns_the_job_at_once_and_its_pool_and_tenant_a_little_later():
    cache = of_two_tenants()
    assert dict(after_bus_change(cache, "team-a.one")) == {JOB: 0.0, POOL: 1.0, BOTH[0]: 1.0}
    assert list(after_bus_change(cache, "team-a.unknown")) == []


def test_what_has_gone_does_not_come_back_with_a_late_answer():
    cache = remembered(a_job(10))
    cache.lose(JOB, "uid-one", 15)
    cache.see(a_job(14), own=True)
    assert cache.get(JOB) is None
    cache.see(a_job(16))  # it had only left our labels, and has them again
    assert cache.get(JOB) is not None
    cache.lose(JOB, "uid-one")
    cache.see(a_job(99))
    assert cache.get(JOB) is None, "it was seen to go for good"


def test_a_successor_that_was_made_while_a_list_was_read_stays():
    cache = remembered(a_job(10))
    known = cache.known(RLJOBS)
    cache.lose(JOB, "uid-one")
    cache.see(a_job(12, uid="its successor"))
    cache.replace([], known)
    assert [body["metadata"]["uid"] for body in cache.all(RLJOBS)] == ["its successor"]


def version(cache: ObjectCache) -> str:
    known = cache.get(JOB)
    return str(known["metadata"]["resourceVersion"])


def test_a_server_whose_store_was_restored_is_believed_when_it_lists():
    lost = remembered(a_job(100))
    lost.lose(JOB, "uid-one")
    assert (lost.replace([a_job(40)], lost.known(RLJOBS)), version(lost)) == (1, "40")
    gone: list[Body] = []
    cache = remembered(a_job(100))
    cache.gone = gone.append
    cache.see(a_job(40))
    assert version(cache) == "100", "a late event is no restored store"
    assert cache.replace([a_job(40)], cache.known(RLJOBS)) == 1
    assert (version(cache), len(gone)) == ("40", 1)
    cache.see(a_job(41))
    assert version(cache) == "41"


def test_what_is_labelled_as_a_pools_counts_in_the_releases_namespace_alone():
    labels = {"labels": {"marlaas.dev/pool": "tiny"}}
    ours, forged = Target(PODS, "marlaas-system", "worker"), Target(PODS, "team-a", "forged")
    cache = remembered(body(ours, 1, metadata=labels), body(forged, 2, metadata=labels))
    assert [pod["metadata"]["name"] for pod in cache.group(("pool", "", "tiny"))] == ["worker"]
    assert list(after_change(cache, forged, None, body(forged, 2, metadata=labels))) == []


def test_a_pool_that_only_an_agent_names_has_the_job_too():
    spec = {"poolRef": {"name": "tiny"}, "agents": [{"name": "a"}, {"name": "b", "poolRef": {"name": "big"}}]}
    cache = remembered(body(JOB, 10, spec=spec))
    big = Target(MODELPOOLS, "", "big")
    assert [target_of(job) for job in cache.group(("jobs of pool", "", "big"))] == [JOB]
    assert JOB in [target for target, _ in after_change(cache, big, None, body(big, 11))]
    assert {POOL, big} <= {target for target, _ in after_bus_change(cache, "team-a.one")}


def test_every_kind_that_the_operator_knows_has_a_handler():
    registry = kopf.get_default_registry()
    selectors = {handler.selector for handler in registry._watching.get_all_handlers()}
    known = {(one.group, one.version, one.plural) for one in (*KINDS, *OWNED)}
    assert {(one.group, one.version, one.any_name) for one in selectors} == known
