"""A namespace that is deleted takes its jobs with it: with the controllers, which end namespaces and collect what is owned."""

import pytest
from tests.api_server import CRDS, serve_kinds
from tests.operator.objects import namespace
from tests.operator.real.harness import eventually, rigged
from tests.operator.real.orchestrators import ScriptedOrchestrator

from marlaas_api import subjects
from marlaas_e2e.control_plane import ControlPlane
from marlaas_operator.cluster import Target
from marlaas_operator.cluster.resources import NAMESPACES


@pytest.mark.slow
async def test_a_namespace_goes_with_its_jobs(control_plane_with_controllers: ControlPlane) -> None:
    plane, team = control_plane_with_controllers, Target(NAMESPACES, "", "leaving")
    serve_kinds(plane)
    async with rigged(plane) as harness:
        bus = await harness.connect_orchestrator()
        async with ScriptedOrchestrator(bus).running() as orchestrator:
            await harness.gateway.apply(namespace(team.name))
            await harness.run_job(orchestrator, team.name)
            await harness.gateway.delete(team)
            await harness.gone(team, 100.0)
            jobs = await bus.bucket(subjects.JOBS)
            await eventually(
                harness,
                "the bus forgot the job",
                lambda: jobs.get(f"{team.name}.one"),
                accept=lambda entry: entry is None,
            )
        await bus.close()
    plane.kubectl("delete", "--filename", CRDS)  # tests of the chart install them
    plane.kubectl("delete", "namespace", "marlaas-system")
