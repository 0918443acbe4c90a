"""Whatever happens in whatever order, and wherever the orchestrator dies: steps are full, fresh and in order, every group ends in one record,
no turn that is to be trained is purged, and neither the log of assignments nor the turns grow with what is on record."""

import random
import sys
from collections.abc import Callable
from types import FrameType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.harness import a_manifest
from tests.orchestrator.accounting import GROUP_SIZE, AccountingHarness, RestartingHarness

from marlaas_api.messages import IssueLedger, PolicyRecord, StepClosed
from marlaas_worker.orchestrator.job_state import JobState
from marlaas_worker.orchestrator.recorded_totals import History
from marlaas_worker.orchestrator.step_records import Around, step_record

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


def executed(work: Callable[[], object]) -> int:
    """The number of bytecode instructions that a call executes."""
    number = 0

    def count(frame: FrameType, event: str, _: object) -> object:
        nonlocal number
        frame.f_trace_opcodes = True
        number += event == "opcode"
        return count

    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(None)
    return number


def test_taking_up_and_recording_a_step_is_linear_in_its_groups(document, play):
    def instructions(num: int) -> int:
        job = document(groupsPerStep=num, maxStaleness=1, maxRefill=3)
        log, episodes = [], []
        ledger = IssueLedger(
            namespace="team-a", job="sums", uid=job.uid, next_index=2 * num, open=tuple(range(2 * num))
        )
        at_0 = {"policy": PolicyRecord(uid=job.uid, version=0)}
        first = JobState(job, History(ledger=ledger, policies=at_0))
        for index in range(2 * num):
            episodes += play(job, index, (1.0, float(index % 2)))
            first.add_episode(episodes[-2])
            first.add_episode(episodes[-1])
            log += first.resolve(first.groups.complete[index], {"policy": 0})
        assert [message.num_groups for message in log if isinstance(message, StepClosed)] == [num]

        def take_up() -> None:
            state = JobState(job, History(groups=tuple(log), ledger=ledger, policies=at_0))
            for episode in episodes:
                state.add_episode(episode)
            assert state.groups.resolvable(in_order=state.strict) == []
            (draft, _) = state.assembly.drafts
            state.record(step_record(job, draft, {"policy": a_manifest(job, 1, step=0)}, Around(0.0, 0.0)))
            assert len(state.groups.decided) == 1

        return executed(take_up)

    small, large = instructions(100), instructions(400)
    assert large < 4.2 * small
