"""Before helm takes the operator away: what it made goes, what others made stays, and no finalizer of ours is left."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.operator import objects
from tests.operator.objects import body, installation

from marlaas_operator.cluster import Conflict, Forbidden, Invalid, Resource, Target, Unavailable
from marlaas_operator.cluster.memory import MemoryCluster
from marlaas_operator.cluster.resources import CONFIG_MAPS, DEPLOYMENTS, MODELPOOLS, NETWORK_POLICIES, RLJOBS, SECRETS
from marlaas_operator.installation import BlobSettings
from marlaas_operator.uninstall import LeftBehind, clean_up, kept_text

INSTALLATION = installation()
JOB = Target(RLJOBS, "team-a", "job")
OURS = {"app.kubernetes.io/managed-by": "marlaas-operator", "app.kubernetes.io/instance": "marlaas"}
ANOTHER_RELEASES = {**OURS, "app.kubernetes.io/instance": "trial"}
OBJECT_STORE = {"blobs": BlobSettings(url="s3://bucket/marlaas"), "nats_pod_selector": None}
CLAIMS = "the claim data-marlaas-nats-0 (progress and records of the jobs), the claim marlaas-blobs (all trained"


def sandbox(labels: dict[str, str] = OURS) -> list[dict[str, Any]]:
    kinds = (("apps/v1", "Deployment"), ("v1", "Secret"), ("networking.k8s.io/v1", "NetworkPolicy"))
    return [body(version, kind, "team-a", "job-sandbox", labels=labels) for version, kind in kinds]


def job(*finalizers: str) -> dict[str, Any]:
    made = objects.job("team-a", "job", "p")
    return {**made, "metadata": {**made["metadata"], "finalizers": list(finalizers)}}


def fails(verb: str, resource: Resource, error: Exception) -> Callable[[str, Target], Exception | None]:
    return lambda called, target: error if (called, target.resource) == (verb, resource) else None


@pytest.fixture
async def cluster() -> MemoryCluster:
    return MemoryCluster("team-a", "marlaas-system")


async def test_the_usage_histories_of_tenants_stay(cluster):
    labels = {**OURS, "marlaas.dev/tenant": "a"}
    await cluster.create(body("v1", "ConfigMap", "marlaas-system", "a-usage", labels=labels))
    await clean_up(cluster, INSTALLATION)
    assert len(await cluster.list(CONFIG_MAPS)) == 1
    assert "usage histories" in kept_text(INSTALLATION)


@pytest.mark.parametrize("labels", [{"app": "theirs"}, ANOTHER_RELEASES], ids=["a team", "another release"])
async def test_what_others_made_stays(cluster, labels):
    for each in sandbox(labels=labels):
        await cluster.create(each)
    await clean_up(cluster, INSTALLATION)
    for resource in (DEPLOYMENTS, NETWORK_POLICIES, SECRETS):
        assert len(await cluster.list(resource)) == 1


@pytest.mark.parametrize("error", [Forbidden, Invalid])
async def test_a_foreign_secret_that_admission_protects_is_passed_over(cluster, error):
    for each in sandbox():
        await cluster.create(each)
    cluster.fail = fails("delete", SECRETS, error("touches only its own"))
    await clean_up(cluster, INSTALLATION)
    assert await cluster.list(DEPLOYMENTS) == []


async def test_what_may_not_be_deleted_keeps_no_finalizer_and_is_named_at_the_end(cluster):
    for each in [*sandbox(), job("marlaas.dev/job", "example.com/theirs")]:
        await cluster.create(each)
    cluster.fail = fails("delete", DEPLOYMENTS, Forbidden("the team's own rule"))
    with pytest.raises(LeftBehind, match="the team's own rule"):
        await clean_up(cluster, INSTALLATION)
    assert await cluster.list(NETWORK_POLICIES) == []
    (released,) = await cluster.list(RLJOBS)
    assert released["metadata"]["finalizers"] == ["example.com/theirs"]


async def test_an_object_that_changes_meanwhile_is_looked_at_again_and_named_in_the_end(cluster):
    await cluster.create(job("marlaas.dev/job"))
    cluster.fail = fails("patch", RLJOBS, Conflict("changed"))
    with pytest.raises(LeftBehind, match="RLJob team-a/job changed 60 times"):
        await clean_up(cluster, INSTALLATION)
    answers = [Conflict("changed"), Conflict("changed")]
    cluster.fail = lambda verb, target: answers.pop() if (verb, target) == ("patch", JOB) and answers else None
    await cluster.delete(JOB)
    await clean_up(cluster, INSTALLATION)
    assert await cluster.list(RLJOBS) == [], "it was only waiting for us"


@pytest.mark.parametrize(
    ("fields", "kept"),
    [({}, CLAIMS), (OBJECT_STORE, "and Tenant, s3://bucket/marlaas (all trained adapters).")],
    ids=["claims", "elsewhere"],
)
def test_what_is_kept_is_said_with_the_command_that_deletes_it(fields, kept):
    told = kept_text(INSTALLATION.model_copy(update=fields))
    assert kept in told
    selector = "app.kubernetes.io/name=marlaas,app.kubernetes.io/instance=marlaas"
    assert f"kubectl --namespace marlaas-system delete persistentvolumeclaims --selector {selector}" in told


async def test_a_second_run_goes_on_where_a_crash_left_it(cluster):
    for each in [*sandbox(), job("marlaas.dev/job")]:
        await cluster.create(each)
    cluster.fail = fails("list", MODELPOOLS, Unavailable("gone away"))
    with pytest.raises(Unavailable):
        await clean_up(cluster, INSTALLATION)
    cluster.fail = lambda verb, target: None
    await clean_up(cluster, INSTALLATION)
    assert await cluster.list(DEPLOYMENTS) == []
