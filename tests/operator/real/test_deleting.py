"""Deleting: whenever it happens, and whoever is away, nothing is left and nothing hangs on a finalizer for ever."""

import pytest
from tests.operator.conftest import install_kinds
from tests.operator.objects import job, namespace
from tests.operator.real.harness import OperatorHarness, eventually, rigged
from tests.operator.real.orchestrators import ScriptedOrchestrator

from marlaas_api import subjects
from marlaas_e2e.control_plane import ControlPlane
from marlaas_e2e.fixtures import control_plane_with_controllers
from marlaas_operator.cluster import Target
from marlaas_operator.cluster.resources import MODELPOOLS, NAMESPACES, RLJOBS

__all__ = ["control_plane_with_controllers"]

ONE = Target(RLJOBS, "team-a", "one")


async def nothing_is_left(harness: OperatorHarness, orchestrator: ScriptedOrchestrator) -> None:
    await harness.gone(ONE, 100.0)
    await harness.owns(0)
    await eventually(harness, "no document is left", lambda: orchestrator.documents == {})


async def test_a_queued_job_goes(harness: OperatorHarness, orchestrator: ScriptedOrchestrator) -> None:
    await harness.queue_job()
    await harness.gateway.delete(ONE)
    await nothing_is_left(harness, orchestrator)


async def test_a_running_job_goes_deleted_twice_and_its_namesake_is_a_job_of_its_own(
    harness: OperatorHarness, orchestrator: ScriptedOrchestrator
) -> None:
    await harness.run_job(orchestrator)
    await harness.gateway.delete(ONE)
    await harness.gateway.delete(ONE)
    await nothing_is_left(harness, orchestrator)
    made = await harness.gateway.create(job("team-a", "one", "tiny"))
    await harness.phase("team-a", "one", "Queued")
    uid = made["metadata"]["uid"]  # "Queued" is also said while the orchestrator's first word is missing
    await eventually(
        harness, "its document", lambda: getattr(orchestrator.documents.get("team-a.one"), "uid", "") == uid
    )


@pytest.mark.slow
async def test_a_job_goes_although_the_bus_is_away_and_its_document_is_swept_when_it_is_back(
    harness: OperatorHarness, orchestrator: ScriptedOrchestrator
) -> None:
    await harness.run_job(orchestrator, variant="hasty")
    await harness.nats.kill()
    await harness.gateway.delete(ONE)
    await harness.gone(ONE, 100.0)
    assert await harness.owned("team-a") == {}
    await harness.nats.start()
    await nothing_is_left(harness, orchestrator)


async def test_a_document_whose_job_went_while_nobody_looked_is_swept_at_the_start(
    harness: OperatorHarness, orchestrator: ScriptedOrchestrator
) -> None:
    await harness.run_job(orchestrator)
    harness.started[-1].kill()
    orchestrator.forgets = False
    await harness.gateway.patch(ONE, {"metadata": {"finalizers": None}})
    await harness.gateway.delete(ONE)
    harness.start_operator()
    await eventually(harness, "the document is marked as deleted", lambda: orchestrator.documents["team-a.one"].deleted)


async def test_a_pool_with_a_job_on_it_stays_until_the_job_is_gone_and_says_why(
    harness: OperatorHarness, orchestrator: ScriptedOrchestrator
) -> None:
    await harness.run_job(orchestrator)
    await harness.gateway.delete(Target(MODELPOOLS, "", "tiny"))
    await harness.says("InUse", "team-a/one")
    assert "StatefulSet tiny-rollout" in await harness.owned("marlaas-system")
    await harness.gateway.delete(ONE)
    await harness.gone(Target(MODELPOOLS, "", "tiny"))
    await nothing_is_left(harness, orchestrator)


@pytest.mark.slow
async def test_a_namespace_goes_with_its_jobs(control_plane_with_controllers: ControlPlane) -> None:
    await install_kinds(control_plane_with_controllers)
    async with rigged(control_plane_with_controllers) as harness:
        bus = await harness.connect_orchestrator()
        async with ScriptedOrchestrator(bus).running() as orchestrator:
            await harness.gateway.apply(namespace("team-a"))
            await harness.run_job(orchestrator)
            await harness.gateway.delete(Target(NAMESPACES, "", "team-a"))
            await harness.gone(Target(NAMESPACES, "", "team-a"), 100.0)
            jobs = await bus.bucket(subjects.JOBS)
            await eventually(
                harness, "the bus forgot the job", lambda: jobs.get("team-a.one"), accept=lambda entry: entry is None
            )
        await bus.close()
