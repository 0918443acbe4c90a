"""What the operator relies on of an API server: the real one and the fake that ships behave alike."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest
from tests.operator.objects import body, job, namespace
from tests.tables import data

from marlaas_operator.cluster import AlreadyExists, Body, Cluster, Conflict, Invalid, NotFound, Target
from marlaas_operator.cluster.memory import MemoryCluster
from marlaas_operator.cluster.resources import CONFIG_MAPS, DEPLOYMENTS, NAMESPACES, RLJOBS, Resource

if TYPE_CHECKING:
    from marlaas_e2e.control_plane import ControlPlane


@pytest.fixture(params=["memory", pytest.param("api_server", marks=pytest.mark.api_server)])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """An API server with the namespace team-a and nothing in it."""
    if request.param == "memory":
        yield MemoryCluster("team-a")
        return
    from marlaas_operator.cluster.api_server import connect

    plane: ControlPlane = request.getfixturevalue("control_plane")
    gateway = await connect(plane.kubeconfig)
    try:
        await gateway.apply(namespace("team-a"))
        yield gateway
        await _sweep(gateway)
    finally:
        await gateway.close()


async def _sweep(gateway: Cluster) -> None:
    for resource in (CONFIG_MAPS, DEPLOYMENTS, RLJOBS):
        for item in await gateway.list(resource, namespace="team-a"):
            await gateway.delete(Target(resource, "team-a", item["metadata"]["name"]))
    await gateway.get(Target(NAMESPACES, "", "team-a"))


def config(name: str, values: dict[str, str], namespace: str = "team-a", **metadata: object) -> Body:
    return body("v1", "ConfigMap", namespace, name, **metadata) | {"data": values}


def deployment(name: str, *env: str) -> Body:
    made: Body = data(__file__, "deployment")
    made["metadata"]["name"] = name
    made["spec"]["template"]["spec"]["containers"][0]["env"] = [{"name": word, "value": "ours"} for word in env]
    return made


def at(name: str, resource: Resource = CONFIG_MAPS) -> Target:
    return Target(resource, "team-a", name)


async def test_what_was_applied_can_be_read_and_listed_by_label(cluster):
    await cluster.apply(config("one", {"a": "1"}, labels={"mine": "yes"}))
    await cluster.apply(config("two", {"a": "1"}, labels={"mine": "no"}))
    assert (await cluster.get(at("one")))["data"] == {"a": "1"}
    listed = await cluster.list(CONFIG_MAPS, namespace="team-a", labels="mine=yes")
    assert [item["metadata"]["name"] for item in listed] == ["one"]
    assert (listed[0]["apiVersion"], listed[0]["kind"]) == ("v1", "ConfigMap")
    everywhere = await cluster.list(CONFIG_MAPS, labels="mine=no")
    assert [item["metadata"]["namespace"] for item in everywhere] == ["team-a"]


async def test_applying_the_same_again_changes_nothing(cluster):
    first = await cluster.apply(deployment("same", "A"))
    again = await cluster.apply(deployment("same", "A"))
    assert first["metadata"]["resourceVersion"] == again["metadata"]["resourceVersion"]


async def test_an_apply_changes_our_fields_drops_what_we_no_longer_want_and_leaves_those_of_others(cluster):
    await cluster.apply(config("mix", {"keep": "1", "drop": "1"}))
    await cluster.patch(at("mix"), {"data": {"theirs": "x"}, "metadata": {"annotations": {"note": "mine"}}})
    await cluster.patch(at("mix"), {"data": {"keep": "changed by somebody"}})
    await cluster.apply(config("mix", {"keep": "2"}))
    after = await cluster.get(at("mix"))
    assert after["data"] == {"keep": "2", "theirs": "x"}
    assert after["metadata"]["annotations"] == {"note": "mine"}


async def test_lists_that_have_a_key_are_merged_by_it(cluster):
    await cluster.apply(deployment("keyed", "A", "B"))
    await cluster.apply(deployment("keyed", "B"))
    containers = (await cluster.get(at("keyed", DEPLOYMENTS)))["spec"]["template"]["spec"]["containers"]
    assert [variable["name"] for variable in containers[0]["env"]] == ["B"]


async def test_an_apply_for_another_uid_is_a_conflict(cluster):
    await cluster.apply(config("other", {"a": "1"}))
    with pytest.raises(Conflict):
        await cluster.apply(config("other", {"a": "2"}, uid="11111111-1111-4111-8111-111111111111"))


async def test_what_is_not_there_is_not_found(cluster):
    with pytest.raises(NotFound, match="nobody"):
        await cluster.get(at("nobody"))
    with pytest.raises(NotFound):
        await cluster.patch(at("nobody"), {"data": {"a": "1"}})
    with pytest.raises(NotFound, match="nowhere"):
        await cluster.create(config("one", {}, namespace="nowhere"))
    assert await cluster.delete(at("nobody"))


async def test_an_object_is_made_once(cluster):
    await cluster.create(config("once", {"a": "1"}))
    with pytest.raises(AlreadyExists, match="once"):
        await cluster.create(config("once", {"a": "2"}))
    assert (await cluster.get(at("once")))["data"] == {"a": "1"}


async def test_a_delete_names_the_uid_that_it_means(cluster):
    made = await cluster.create(config("mine", {}))
    with pytest.raises(Conflict):
        await cluster.delete(at("mine"), uid="11111111-1111-4111-8111-111111111111")
    assert await cluster.delete(at("mine"), uid=made["metadata"]["uid"])
    with pytest.raises(NotFound):
        await cluster.get(at("mine"))


async def test_an_object_with_a_finalizer_goes_when_the_finalizer_goes(cluster):
    await cluster.create(config("held", {}, finalizers=["marlaas.dev/job"]))
    assert not await cluster.delete(at("held"))
    held = await cluster.get(at("held"))
    assert held["metadata"]["deletionTimestamp"]
    await cluster.patch(at("held"), {"metadata": {"finalizers": None}})
    with pytest.raises(NotFound):
        await cluster.get(at("held"))


async def test_a_patch_or_a_status_that_names_an_older_version_is_a_conflict(cluster):
    made = await cluster.create(job("team-a", "older", "tiny"))
    await cluster.patch(at("older", RLJOBS), {"spec": {"priority": 3}})
    stale = {"metadata": {"resourceVersion": made["metadata"]["resourceVersion"]}, "status": {"phase": "Failed"}}
    with pytest.raises(Conflict):
        await cluster.patch(at("older", RLJOBS), stale, status=True)
    assert "status" not in await cluster.get(at("older", RLJOBS))
    made = await cluster.create(config("versions", {"a": "1"}))
    stale = {"metadata": {"resourceVersion": made["metadata"]["resourceVersion"], "finalizers": ["marlaas.dev/job"]}}
    await cluster.patch(at("versions"), {"data": {"a": "2"}})
    with pytest.raises(Conflict):
        await cluster.patch(at("versions"), stale)
    assert "finalizers" not in (await cluster.get(at("versions")))["metadata"]


async def test_a_status_is_written_apart_and_only_the_spec_moves_the_generation(cluster):
    made = await cluster.create(job("team-a", "apart", "tiny"))
    target = at("apart", RLJOBS)
    await cluster.patch(target, {"status": {"phase": "Queued", "step": 1}, "spec": {"priority": 7}}, status=True)
    await cluster.patch(target, {"status": {"step": None, "steps": 4}}, status=True)
    after = await cluster.get(target)
    assert after["status"] == {"phase": "Queued", "steps": 4}
    assert after["spec"].get("priority", 0) == 0
    assert after["metadata"]["generation"] == made["metadata"]["generation"] == 1
    changed = await cluster.patch(target, {"status": {"phase": "Running"}, "spec": {"priority": 7}})
    assert changed["status"]["phase"] == "Queued"
    assert changed["metadata"]["generation"] == 2


async def test_a_refusal_says_what_is_wrong_and_where(cluster):
    with pytest.raises(Invalid, match=r"metadata\.name"):
        await cluster.apply(config("Not_A_Name", {}))
    with pytest.raises(Invalid, match=r"spec\.training\.steps"):
        await cluster.create(job("team-a", "wrong", "tiny", training={"steps": -1, "groupsPerStep": 2}))
