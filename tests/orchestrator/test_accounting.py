"""Whatever happens in whatever order, and wherever the orchestrator dies: steps are full, fresh and in order, every group ends in one record,
no turn that is to be trained is purged, and neither the log of assignments nor the turns grow with what is on record."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.orchestrator.accounting import GROUP_SIZE, AccountingHarness, RestartingHarness

from marlaas_api.messages import StepClosed

ROLES = [
    {"name": "a0"},
    {"name": "second", "policy": {"of": "a0"}},
    {"name": "past", "policy": {"of": "a0", "versions": "past", "window": 2}},
    {"name": "a1"},
]
TEAMS = {
    "one": [[{"name": "policy"}]],
    "two": [[{"name": "a0"}, {"name": "a1"}]],
    "several": [
        [{"name": "a0"}, {"name": "a1"}, {"name": "a2"}],
        [{"name": "a0"}, {"name": "a1"}, {"name": "a2"}, {"name": "a3", "trainable": False}],
        ROLES,
    ],
}
"""The agents of jobs; each job has those of one list."""
WORLDS = {"one": 120, "two": 60, "several": 42}


@pytest.mark.parametrize("deaths", [0.0, 0.1])
@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("team", TEAMS)
def test_steps_are_full_fresh_and_in_order_and_every_group_ends_in_one_record(document, staleness, deaths, team):
    """With several agents: called unevenly, flat for some, trained at their own pace; each step closes once for each policy."""
    for seed in range(WORLDS[team]):
        chance = random.Random(seed)
        rules = {"groupsPerStep": chance.choice([1, 2, 3]), "maxRefill": chance.choice([0, 1, 2])}
        job = document(steps=4, maxStaleness=staleness, agents=TEAMS[team][seed % len(TEAMS[team])], **rules)
        harness = AccountingHarness(job.model_copy(update={"seed": seed}), chance, deaths)
        harness.live()
        assert [record.step for record in harness.records] == [0, 1, 2, 3], seed
        ended = [index for record in harness.records for index in record.indices]
        assert len(ended) == len(set(ended)), seed
        for name, trained in harness.trained.items():
            in_records = sum(record.agents[name].num_groups for record in harness.records)
            assert len(trained) == len(set(trained)) == in_records, seed
            assert staleness or trained == sorted(trained), seed
            closed = [one.step for one in harness.written if isinstance(one, StepClosed) and one.agent == name]
            assert set(closed) == {0, 1, 2, 3}, seed
            assert deaths or len(closed) == 4, seed
        groups = {index for trained in harness.trained.values() for index in trained}
        assert len(groups) == sum(record.num_groups for record in harness.records), seed
        played = {index for index, members in harness.members.items() if members == GROUP_SIZE}
        assert deaths or played <= set(ended), seed
        assert deaths or all(len(log) <= 1 for log in harness.logs.values()), seed
        if not deaths and not staleness:
            assert {index for index, _ in harness.turns} == set(harness.records[-1].indices), seed


@pytest.mark.parametrize("team", TEAMS)
@pytest.mark.parametrize("staleness", [0, 1, 2])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000), per_step=st.integers(1, 3), refill=st.integers(0, 2), kill=st.integers(0, 200))
def test_wherever_the_orchestrator_is_killed_log_records_and_faults_are_those_without_a_restart(
    document, staleness, team, seed, per_step, refill, kill
):
    rules = {"groupsPerStep": per_step, "maxRefill": refill, "data": {"tasks": 6, "skip": {"passes": 2}}}
    job = document(steps=4, maxStaleness=staleness, agents=TEAMS[team][seed % len(TEAMS[team])], **rules)
    job = job.model_copy(update={"seed": seed})
    whole = RestartingHarness(job, seed, ())
    whole.live()
    for kills in ({kill % whole.num_effects}, range(10_000)):
        harness = RestartingHarness(job, seed, kills)
        harness.live()
        assert harness.results() == whole.results()
