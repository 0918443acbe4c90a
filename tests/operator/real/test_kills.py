"""kill -9 of the operator between any two actions: the next one gets to the same end, and nothing is made twice.

Each chain starts an operator that dies at the first place, then one that dies at the second, and so on, through one piece of life.
"""

import pytest
from tests.operator.real.orchestrators import ADMITTED, ScriptedOrchestrator
from tests.operator.real.rig import Rig, eventually, job, pool

from marlaas_operator.cluster import Target
from marlaas_operator.cluster.resources import RLJOBS

POOL = (
    "planned",
    "after_AddFinalizer",
    "after_Apply_ServiceAccount",
    "after_Apply_ConfigMap",
    "after_Apply_NetworkPolicy",
    "after_Apply_Secret",
    "after_Apply_Service",
    "after_Apply_PodDisruptionBudget",
    "after_Apply_StatefulSet",
    "after_status",
)
QUEUED = ("planned", "after_AddFinalizer", "after_WriteDocument", "after_status")
SANDBOX = (
    "planned",
    "after_Apply_ServiceAccount",
    "after_Apply_NetworkPolicy",
    "after_Apply_Secret",
    "after_Apply_Deployment",
    "after_status",
)
DELETION = (
    "planned",
    "after_WriteDocument",
    "after_Delete_Deployment",
    "after_Delete_Secret",
    "after_Delete_NetworkPolicy",
    "after_Delete_ServiceAccount",
    "after_RemoveFinalizer",
)


async def die_at_each(rig: Rig, places: tuple[str, ...]) -> list[str]:
    """Start an operator for each place; return the places that were passed and killed at."""
    killed = []
    for place in places:
        marker = rig.folder / f"{len(rig.started)}-{place}"
        operator = rig.start_operator(failpoint=f"operator.reconcile.{place}@{marker}")

        async def settled(operator: object = operator) -> bool:
            return not rig.started[-1].alive or rig.metric("marlaas_operator_quiet_seconds") > 3.0

        await eventually(rig, f"killed at {place}, or nothing left to do", settled)
        if marker.exists():
            killed.append(place)
        operator.kill()
    rig.start_operator()
    return killed


def made_once(objects: dict[str, dict[str, object]]) -> bool:
    """No object was ever changed after it was made."""
    return all(body["metadata"].get("generation", 1) == 1 for body in objects.values())  # type: ignore[attr-defined]


@pytest.mark.slow
async def test_a_pool_comes_up_once_through_any_kill(rig: Rig, orchestrator: ScriptedOrchestrator) -> None:
    await rig.gateway.create(pool("tiny"))
    killed = await die_at_each(rig, POOL)

    async def told() -> bool:
        return bool(((await rig.pool("tiny")) or {}).get("status"))

    await eventually(rig, "the pool has a status", told)
    owned = await rig.owned("marlaas-system")
    assert len(owned) == 12
    assert made_once(owned)
    assert len(await rig.events()) == len(set(await rig.events()))
    assert set(killed) >= {"planned", "after_Apply_StatefulSet", "after_status"}


@pytest.mark.slow
async def test_a_job_is_handed_over_run_and_deleted_once_through_any_kill(
    rig: Rig, orchestrator: ScriptedOrchestrator
) -> None:
    await rig.gateway.create(pool("tiny"))
    await rig.gateway.create(job("team-a", "one", "tiny"))
    killed = await die_at_each(rig, QUEUED)
    await rig.phase("team-a", "one", "Queued")
    assert orchestrator.documents["team-a.one"].generation == 1

    rig.started[-1].kill()
    await orchestrator.say("team-a", "one", **ADMITTED)
    killed += await die_at_each(rig, SANDBOX)
    await rig.phase("team-a", "one", "Running")
    owned = await rig.owned("team-a")
    assert len(owned) == 4
    assert made_once(owned)
    assert len(await rig.events()) == len(set(await rig.events()))

    rig.started[-1].kill()
    orchestrator.forgets = False
    await rig.gateway.delete(Target(RLJOBS, "team-a", "one"))
    killed += await die_at_each(rig, DELETION[:-1])
    orchestrator.forgets = True
    await orchestrator.forget("team-a.one")
    await rig.gone(Target(RLJOBS, "team-a", "one"))
    assert await rig.owned("team-a") == {}
    assert set(killed) >= {*QUEUED, *SANDBOX, "after_Delete_Deployment"}
