"""The figures in a job's status, of the job and of each agent, and its columns."""

import pytest
from tests.operator.policies.scenes import INSTALLATION, NOW, progress, rljob, running

from marlaas_api.kinds.status import RLJobStatus
from marlaas_api.messages import AgentProgress, UsageAmounts
from marlaas_operator.policies.job import plan_job


def status(scene, now=NOW):
    return plan_job(scene, INSTALLATION, now).status


def test_every_figure_of_the_orchestrator_is_in_the_status_rounded_for_people():
    told = progress(
        message="step 13 of 40",
        step=12,
        versions={"policy": 11},
        adapters={"policy": "team-a/sums/u1/policy/v11"},
        reward=0.123456,
        eval_before=0.1,
        eval_last=0.75,
        staleness=0.66666,
        tokens=1234,
        tokens_per_s=99.99,
        accelerator_s=7.77,
        faults={"env": 2},
        training_faults={"non-finite": 1},
        usage={"policy": UsageAmounts(generated_tokens=1000, trained_tokens=900, stale_tokens=100)},
        agents={"policy": AgentProgress(reward=0.123456, eval_before=0.1, eval_last=0.75, staleness=0.66666)},
        started_at=NOW - 50.5,
    )
    found = status(running(progress=told))
    assert {key: value for key, value in found.items() if key != "conditions"} == {
        "observedGeneration": 1,
        "phase": "Running",
        "reason": "Training",
        "message": "step 13 of 40",
        "tenant": "namespace/team-a",
        "progress": "12/40",
        "step": 12,
        "steps": 40,
        "agents": [
            {
                "name": "policy",
                "policyVersion": 11,
                "adapter": "team-a/sums/u1/policy/v11",
                "reward": 0.123,
                "evalBefore": 0.1,
                "evalLast": 0.75,
                "staleness": 0.667,
                "usage": {"generatedTokens": 1000, "trainedTokens": 900, "staleTokens": 100, "wastedTokens": 100},
            }
        ],
        "versions": "11",
        "reward": 0.123,
        "evalBefore": 0.1,
        "evalLast": 0.75,
        "staleness": 0.667,
        "tokens": 1234,
        "tokensPerSecond": 100.0,
        "acceleratorSeconds": 7.8,
        "usage": {
            **{"generatedTokens": 1234, "trainedTokens": 900, "staleTokens": 100, "openTokens": 234},
            **{"wastedTokens": 100, "engineSeconds": 7.8},
        },
        "faults": {"env": 2},
        "trainingFaults": {"non-finite": 1},
        "startedAt": "2027-01-15T07:59:09Z",
    }
    RLJobStatus.model_validate(found)


def test_each_agent_of_a_team_has_its_own_figures_and_a_player_those_of_its_role():
    """A player has the versions of the policy that it plays, and no adapter or usage: these are that policy's."""
    team = [{"name": "solver"}, {"name": "critic"}, {"name": "second", "policy": {"of": "solver"}}]
    told = progress(
        versions={"solver": 3, "critic": 2},
        promoted={"solver": 2, "critic": 1},
        adapters={"solver": "team-a/sums/u1/solver/v2", "critic": "team-a/sums/u1/critic/v1"},
        usage={"solver": UsageAmounts(generated_tokens=8, trained_tokens=8, slot_s=2.5, stored_bytes=7)},
        agents={
            "solver": AgentProgress(reward=0.5, eval_before=0.1, eval_last=0.9, staleness=1.0),
            "critic": AgentProgress(eval_last=0.25),
            "second": AgentProgress(reward=0.75, staleness=0.5),
        },
    )
    solver = {"policyVersion": 3, "promotedVersion": 2, "adapter": "team-a/sums/u1/solver/v2"}
    critic = {"policyVersion": 2, "promotedVersion": 1, "adapter": "team-a/sums/u1/critic/v1"}
    found = status(running(job=rljob({"agents": team}), progress=told))
    assert found["agents"] == [
        {
            **{"name": "solver", **solver, "reward": 0.5, "evalBefore": 0.1, "evalLast": 0.9, "staleness": 1.0},
            "usage": {"generatedTokens": 8, "trainedTokens": 8, "slotSeconds": 2.5, "storedBytes": 7},
        },
        {"name": "critic", **critic, "evalLast": 0.25, "staleness": 0.0},
        {"name": "second", "policyVersion": 3, "promotedVersion": 2, "reward": 0.75, "staleness": 0.5},
    ]
    RLJobStatus.model_validate(found)


@pytest.mark.parametrize(
    ("names", "newest", "shown"),
    [
        (("a", "b"), {"a": 12, "b": 11}, "12/11"),
        (("a", "b"), {"b": 0}, "?/0"),
        (("a", "b"), {}, None),
        ([f"a{number}" for number in range(16)], {f"a{number}": 90 + number for number in range(16)}, "90-105"),
    ],
)
def test_the_column_version_has_the_version_of_every_policy(names, newest, shown):
    """A player of another agent's policy has no version of its own."""
    agents = [*({"name": name} for name in names), {"name": "past", "policy": {"of": names[0], "versions": "past"}}]
    job = rljob({"agents": agents[:16]})
    assert status(running(job=job, progress=progress(versions=newest))).get("versions") == shown


def test_only_moved_figures_are_not_urgent_and_tell_no_event_and_a_number_that_json_cannot_say_is_left_out():
    assert "reward" not in status(running(progress=progress(reward=float("nan"))))
    before = {key: value for key, value in status(running()).items() if value is not None}
    found = plan_job(running(status=before, progress=progress(tokens=5)), INSTALLATION, NOW + 9)
    assert (found.status["tokens"], found.urgent, found.events) == (5, False, ())
