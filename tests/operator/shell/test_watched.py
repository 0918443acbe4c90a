"""What is remembered of the cluster: never older than what was seen, and found by what it belongs to."""

from marlaas_operator.cluster import Body, Target
from marlaas_operator.cluster.resources import DEPLOYMENTS, MODELPOOLS, PODS, RLJOBS, TENANTS
from marlaas_operator.routes import after_bus_change, after_change
from marlaas_operator.watched import Watched

JOB = Target(RLJOBS, "team-a", "one")
POOL = Target(MODELPOOLS, "", "tiny")


def body(target: Target, version: int, **more: object) -> Body:
    metadata = {"name": target.name, "uid": f"uid-{target.name}", "resourceVersion": str(version), "generation": 1}
    if target.namespace:
        metadata["namespace"] = target.namespace
    metadata.update(more.pop("metadata", {}))  # type: ignore[call-overload]
    kind = {"apiVersion": target.resource.api_version, "kind": target.resource.kind}
    return {**kind, "metadata": metadata, "spec": {}, **more}


def a_job(version: int, **metadata: object) -> Body:
    return body(JOB, version, spec={"poolRef": {"name": "tiny"}}, metadata=metadata)


def remembered(*bodies: Body) -> Watched:
    watched = Watched(lambda target, before, after: None, "marlaas-system")
    for one in bodies:
        watched.see(one)
    return watched


def test_what_is_older_than_what_is_known_is_ignored() -> None:
    watched = remembered(a_job(10), a_job(9, labels={"late": "yes"}))
    known = watched.get(JOB)
    assert known is not None
    assert "labels" not in known["metadata"]


def test_an_object_is_lost_only_as_the_one_that_it_was() -> None:
    watched = remembered(a_job(10))
    watched.lose(JOB, "another uid")
    assert watched.get(JOB) is not None
    watched.lose(JOB, "uid-one")
    assert watched.get(JOB) is None
    assert watched.group(("jobs of pool", "", "tiny")) == []


def test_a_list_drops_what_was_known_before_it_was_asked_for_and_is_not_in_it() -> None:
    watched = remembered(a_job(10))
    known = watched.known(RLJOBS)
    newer = Target(RLJOBS, "team-a", "two")
    watched.see(body(newer, 12, spec={"poolRef": {"name": "tiny"}}))
    watched.replace([], known)
    assert watched.targets(RLJOBS) == [newer]


def test_our_own_write_is_no_news() -> None:
    told: list[Target] = []
    watched = Watched(lambda target, before, after: told.append(target), "marlaas-system")
    watched.see(a_job(10))
    watched.see(a_job(11), own=True)
    watched.see(a_job(11))
    assert told == [JOB]


def test_belongings_are_found_by_label() -> None:
    sandbox = Target(DEPLOYMENTS, "team-a", "one-sandbox")
    watched = remembered(body(sandbox, 1, metadata={"labels": {"marlaas.dev/job": "one"}}))
    assert [item["metadata"]["name"] for item in watched.group(("job", "team-a", "one"))] == ["one-sandbox"]


def test_a_jobs_new_status_concerns_the_job_alone_and_a_new_spec_its_pool_and_tenants_too() -> None:
    tenant = Target(TENANTS, "", "a")
    watched = remembered(a_job(10), body(tenant, 1, spec={"namespaces": ["team-a"]}))
    only_status = {**a_job(11), "status": {"phase": "Queued"}}
    assert {target for target, _ in after_change(watched, JOB, a_job(10), only_status)} == {JOB}
    new_spec = a_job(12, generation=2)
    assert {target for target, _ in after_change(watched, JOB, a_job(10), new_spec)} == {JOB, POOL, tenant}


def test_a_pool_concerns_its_jobs_unless_only_its_status_changed() -> None:
    watched = remembered(a_job(10))
    pool, reported = body(POOL, 1), body(POOL, 2, status={"jobs": 1})
    assert {target for target, _ in after_change(watched, POOL, None, pool)} == {POOL, JOB}
    assert {target for target, _ in after_change(watched, POOL, pool, reported)} == {POOL}


def test_a_pod_concerns_whose_it_is_when_it_says_something_new() -> None:
    watched = remembered(a_job(10))
    pod = Target(PODS, "marlaas-system", "tiny-rollout-0")
    before = body(pod, 1, metadata={"labels": {"marlaas.dev/pool": "tiny"}})
    touched = body(pod, 2, metadata={"labels": {"marlaas.dev/pool": "tiny"}, "annotations": {"x": "y"}})
    ready = {**touched, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    assert list(after_change(watched, pod, before, touched)) == []
    assert {target for target, _ in after_change(watched, pod, touched, ready)} == {POOL, JOB}


def test_progress_concerns_the_job_at_once_and_its_pool_a_little_later() -> None:
    watched = remembered(a_job(10))
    assert dict(after_bus_change(watched, "team-a.one")) == {JOB: 0.0, POOL: 1.0}
    assert list(after_bus_change(watched, "team-a.unknown")) == []


def test_what_has_gone_does_not_come_back_with_a_late_answer() -> None:
    watched = remembered(a_job(10))
    watched.lose(JOB, "uid-one", 15)
    watched.see(a_job(14), own=True)
    assert watched.get(JOB) is None
    watched.see(a_job(16))  # it had only left our labels, and has them again
    assert watched.get(JOB) is not None


def test_what_we_saw_go_for_good_never_comes_back() -> None:
    watched = remembered(a_job(10))
    watched.lose(JOB, "uid-one")
    watched.see(a_job(99))
    assert watched.get(JOB) is None


def test_a_successor_that_was_made_while_a_list_was_read_stays() -> None:
    watched = remembered(a_job(10))
    known = watched.known(RLJOBS)
    watched.lose(JOB, "uid-one")
    watched.see(a_job(12, uid="its successor"))
    watched.replace([], known)
    assert [body["metadata"]["uid"] for body in watched.all(RLJOBS)] == ["its successor"]


def version(watched: Watched) -> str:
    known = watched.get(JOB)
    assert known is not None
    return str(known["metadata"]["resourceVersion"])


def test_a_server_whose_store_was_restored_is_believed_when_it_lists() -> None:
    told: list[bool] = []
    watched = Watched(lambda target, before, after: told.append(after is not None), "marlaas-system")
    watched.see(a_job(100))
    watched.see(a_job(40))
    assert version(watched) == "100", "a late event is no restored store"
    assert watched.replace([a_job(40)], watched.known(RLJOBS)) == 1
    assert (version(watched), told) == ("40", [True, False, True])
    watched.see(a_job(41))
    assert version(watched) == "41"


def test_what_had_gone_and_was_restored_is_there_again() -> None:
    watched = remembered(a_job(100))
    watched.lose(JOB, "uid-one")
    assert watched.replace([a_job(40)], watched.known(RLJOBS)) == 1
    assert version(watched) == "40"


def test_what_was_seen_while_a_list_was_read_is_newer_than_the_list() -> None:
    watched = remembered(a_job(10))
    known = watched.known(RLJOBS)
    watched.see(a_job(12))
    assert watched.replace([a_job(10)], known) == 0
    assert version(watched) == "12"
    known = watched.known(RLJOBS)
    watched.lose(JOB, "uid-one")
    assert watched.replace([a_job(12)], known) == 0
    assert watched.get(JOB) is None


def test_what_is_labelled_as_a_pools_counts_in_the_releases_namespace_alone() -> None:
    labels = {"labels": {"marlaas.dev/pool": "tiny"}}
    ours, forged = Target(PODS, "marlaas-system", "worker"), Target(PODS, "team-a", "forged")
    watched = remembered(body(ours, 1, metadata=labels), body(forged, 2, metadata=labels))
    assert [pod["metadata"]["name"] for pod in watched.group(("pool", "", "tiny"))] == ["worker"]
    assert list(after_change(watched, forged, None, body(forged, 2, metadata=labels))) == []
