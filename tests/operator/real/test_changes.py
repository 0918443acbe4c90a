"""What may be changed of a job that exists takes effect at once, on a real API server: steps, suspension, patience, and its time after the end."""

import operator
from typing import Any

import pytest
from tests.operator.objects import job, pool
from tests.operator.real.harness import OperatorHarness, eventually
from tests.operator.real.orchestrators import ADMITTED, ScriptedOrchestrator

from marlaas_api.messages import JobDocument
from marlaas_operator.cluster import Invalid, Target
from marlaas_operator.cluster.resources import RLJOBS

ONE = Target(RLJOBS, "team-a", "one")
SUSPENDED = {"phase": "Suspended", "admitted": False, "reason": "Suspended", "message": "spec.suspend is true"}
SUCCEEDED = {"phase": "Succeeded", "admitted": False, "reason": "Finished", "message": "done", "step": 4}


@pytest.fixture
async def running(harness: OperatorHarness, orchestrator: ScriptedOrchestrator) -> OperatorHarness:
    """A job at work, with its sandbox."""
    await harness.run_job(orchestrator)
    return harness


def document(orchestrator: ScriptedOrchestrator) -> JobDocument:
    return orchestrator.documents["team-a.one"]


async def hears(harness: OperatorHarness, orchestrator: ScriptedOrchestrator, field: str, wanted: Any) -> None:
    """Wait until the job's document has this value in a field of its spec."""
    value = operator.attrgetter(f"spec.{field}")
    await eventually(harness, f"{field} is {wanted}", lambda: value(document(orchestrator)) == wanted)


CHANGES: list[tuple[dict[str, Any], str, Any]] = [
    ({"training": {"steps": 9}}, "training.steps", 9),
    ({"priority": 7}, "priority", 7),
    ({"activeDeadlineSeconds": 60}, "active_deadline_seconds", 60),
    ({"suspend": True}, "suspend", True),
]
"""A change, and where the job's document has it. The operator itself acts on the other fields that may change."""

REFUSED = [
    ({"training": {"steps": 3}}, "may be raised but not lowered: finished steps cannot be undone"),
    ({"poolRef": {"name": "other"}}, "cannot change once the job exists; delete the job and create a new one"),
    ({"adapterRetention": "delete"}, "cannot change once the job exists; delete the job and create a new one"),
]


async def test_what_may_change_reaches_the_orchestrator_change_by_change(
    running: OperatorHarness, orchestrator: ScriptedOrchestrator
) -> None:
    uid = document(orchestrator).uid
    for number, (change, where, wanted) in enumerate(CHANGES, 2):
        await running.gateway.patch(ONE, {"spec": change})
        await hears(running, orchestrator, where, wanted)
        assert document(orchestrator).generation == number
    assert document(orchestrator).uid == uid


async def test_what_may_not_is_refused_while_the_job_runs_on(
    running: OperatorHarness, orchestrator: ScriptedOrchestrator
) -> None:
    await running.owns(4)
    before = document(orchestrator)
    for change, sentence in REFUSED:
        with pytest.raises(Invalid, match=sentence):
            await running.gateway.patch(ONE, {"spec": change})
    assert document(orchestrator) == before
    await running.owns(4)


async def test_a_suspended_job_gives_its_sandbox_back_and_has_one_again_when_it_goes_on(
    running: OperatorHarness, orchestrator: ScriptedOrchestrator
) -> None:
    await running.owns(4)
    await running.gateway.patch(ONE, {"spec": {"suspend": True}})
    await orchestrator.say("team-a", "one", **SUSPENDED, step=2)
    status = await running.phase("team-a", "one", "Suspended")
    assert (status["reason"], status["step"]) == ("Suspended", 2)
    await running.owns(0)
    await running.gateway.patch(ONE, {"spec": {"suspend": False}})
    await orchestrator.say("team-a", "one", **ADMITTED, step=2)
    await running.phase("team-a", "one", "Running")
    await running.owns(4)
    once = ["RLJob/one Admitted", "RLJob/one Admitted", "RLJob/one Suspended"]
    await eventually(
        running,
        "each of the three transitions is told once",
        running.events,
        accept=lambda told: [event for event in told if event.startswith("RLJob/")] == once,
    )


async def test_a_job_goes_by_itself_when_its_time_after_the_end_is_over(
    running: OperatorHarness, orchestrator: ScriptedOrchestrator
) -> None:
    await running.gateway.patch(ONE, {"spec": {"ttlSecondsAfterFinished": 1}})
    await orchestrator.say("team-a", "one", **SUCCEEDED)
    await running.gone(ONE)
    assert await running.owned("team-a") == {}
    await eventually(running, "the orchestrator has forgotten the job", lambda: orchestrator.documents == {})


async def test_a_job_without_such_a_time_stays_and_more_steps_make_it_go_on(
    running: OperatorHarness, orchestrator: ScriptedOrchestrator
) -> None:
    await orchestrator.say("team-a", "one", **SUCCEEDED)
    await running.phase("team-a", "one", "Succeeded")
    await running.owns(0)
    await running.gateway.patch(ONE, {"spec": {"training": {"steps": 6}}})

    await hears(running, orchestrator, "training.steps", 6)
    await orchestrator.say("team-a", "one", **ADMITTED, step=4)
    status = await running.phase("team-a", "one", "Running")
    assert status["progress"] == "4/6"
    assert "finishedAt" not in status
    await running.owns(4)


async def test_a_job_that_could_never_run_goes_by_its_time_too(
    harness: OperatorHarness, orchestrator: ScriptedOrchestrator
) -> None:
    """Nothing but its own clock calls on it: it had no sandbox whose end would be news."""
    await harness.gateway.create(pool("tiny"))
    harness.start_operator()
    frozen = [{"name": "policy", "trainable": False}]
    await harness.gateway.create(job("team-a", "one", "tiny", ttlSecondsAfterFinished=1, agents=frozen))
    await harness.gone(ONE)
