"""The operator with the rights that the chart gives it, and no others: no wildcard, and everything works."""

import asyncio

import pytest
from tests.operator.objects import SYSTEM, job, pool
from tests.operator.real.harness import OperatorHarness
from tests.operator.real.orchestrators import ADMITTED, ScriptedOrchestrator
from tests.operator.real.rights import GROUPS, USER, granted, in_force, install

from marlaas_operator.cluster import Forbidden, Invalid, Target
from marlaas_operator.cluster.api_server import connect
from marlaas_operator.cluster.resources import RLJOBS, SECRETS


async def test_a_job_lives_and_goes_with_the_charts_rights_alone(
    harness: OperatorHarness, orchestrator: ScriptedOrchestrator
) -> None:
    install(harness, "default")
    await harness.gateway.create(pool("tiny"))
    await granted(harness, harness.installation.bus_secret)
    operator = harness.start_operator(kubeconfig=harness.plane.user_kubeconfig(USER, GROUPS))
    await harness.gateway.create(job("team-a", "one", "tiny"))
    await harness.phase("team-a", "one", "Queued")
    await orchestrator.say("team-a", "one", **ADMITTED)
    await harness.phase("team-a", "one", "Running")
    assert len(await harness.owned("team-a")) == 4

    await harness.owns(12, SYSTEM)
    await harness.gateway.delete(Target(RLJOBS, "team-a", "one"))
    await harness.gone(Target(RLJOBS, "team-a", "one"))
    assert "forbidden" not in operator.log.read_text()
    assert harness.metric("marlaas_operator_api_requests_total", status="403") == 0
    assert harness.metric("marlaas_operator_api_requests_total", verb="POST", resource="events", status="201") >= 1


async def test_it_cannot_read_a_tenants_secret_nor_touch_what_is_not_its_own(harness: OperatorHarness) -> None:
    install(harness, "default")
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "theirs", "namespace": "team-a"}}
    await harness.gateway.apply(secret)
    await in_force(harness, Target(SECRETS, "team-a", "theirs"))
    as_operator = await connect(harness.plane.user_kubeconfig(USER, GROUPS))
    try:
        for refused in (
            as_operator.get(Target(SECRETS, "team-a", "theirs")),
            as_operator.list(SECRETS, namespace="team-a"),
            as_operator.delete(Target(SECRETS, "team-a", "theirs")),
        ):
            with pytest.raises((Forbidden, Invalid), match="forbidden"):
                await refused
    finally:
        await as_operator.close()


async def test_without_rights_it_says_which_one_is_missing_and_ends(harness: OperatorHarness) -> None:
    operator = harness.start_operator(kubeconfig=harness.plane.user_kubeconfig("nobody-in-particular", []))
    assert await asyncio.to_thread(operator.wait, 60) == 2
    assert "is forbidden" in operator.last_words()
