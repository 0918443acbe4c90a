"""Sixteen jobs of four tenants on few slots, some preempted, and one process of each kind killed: exact, and nothing left."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.loop.crowd import KEPT, Crowd, crowd, job, kept, pool
from tests.loop.crowd_end import End, read_end

from marlaas_api import subjects
from marlaas_api.messages import Phase, TokenUse
from marlaas_api.messages.usage import total

pytestmark = pytest.mark.slow

VICTIMS = ("orchestrator", "rollout-1", "trainer-0", "nats-server")
STEPS_BETWEEN = 6
"""Steps that the jobs finish after a kill before the next one."""
EARLY, LATE = 24, 2
"""Steps of the jobs that start first, and of those that preempt some of them. The first must outlast `marlaas submit`, about 4 s."""
GROUP, GROUPS, MAX_RESOLVED = 4, 2, 6
"""Members of a group, groups of a full step, and resolved groups after which a step closes although it is not full."""
KEPT_STATES = 2


def names(teams: str) -> list[str]:
    return [f"team-{team}/job-{number}" for team in teams for number in range(4)]


@dataclass(frozen=True)
class Ended:
    end: End
    code: int
    preempted: set[str]
    unfinished: int
    """Jobs that had not ended at the last kill."""


async def play(run: Crowd, submit: Callable[[], Awaitable[None]]) -> int:
    """Let late tenants preempt early ones, and kill one process after another. Return the jobs that outlive the last kill."""
    await run.until(lambda: sum(line.get("step", 0) > 0 for line in run.seen.values()) >= 4)
    await submit()
    await run.until(lambda: bool(run.preempted))
    for victim in VICTIMS:
        await run.kill(victim)
        unfinished, goal = sum(not Phase(one).final for one in run.phases().values()), run.steps + STEPS_BETWEEN
        await run.until(lambda goal=goal: run.steps >= goal)
    await run.until(lambda: len(run.phases()) == 16 and all(Phase(one).final for one in run.phases().values()))
    return unfinished


async def run_to_end(model: Path, folder: Path) -> Ended:
    early, late = (
        [job(name, steps, n % 2) for n, name in enumerate(names(teams))]
        for teams, steps in (("ab", EARLY), ("cd", LATE))
    )
    async with crowd(folder, pool(model), *early, *kept()) as run:
        unfinished = await play(run, lambda: run.submit(pool(model), *late))
        end = await read_end(run, *names("abcd"))
        return Ended(end, await run.end(), run.preempted, unfinished)


@pytest.fixture(scope="module")
def ended(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return asyncio.run(run_to_end(tiny_model, tmp_path_factory.mktemp("crowd")))


def test_all_jobs_end_well_although_some_were_preempted_and_processes_killed(ended):
    assert ended.code == 0
    assert {one.progress.phase for one in ended.end.jobs} == {Phase.SUCCEEDED}
    assert ended.preempted
    assert ended.unfinished > 0


def test_every_index_is_in_one_record_and_every_step_is_full(ended):
    for one in ended.end.jobs:
        assert [step.step for step in one.steps] == list(range(one.document.spec.training.steps))
        indices = [index for step in one.steps for index in step.indices]
        assert sorted(indices) == sorted(set(indices))
        assert all(step.num_groups == GROUPS or len(step.indices) >= MAX_RESOLVED for step in one.steps)
        assert len(one.consumed) == len(set(one.consumed)) == sum(step.num_groups for step in one.steps)


def test_the_tokens_of_every_recorded_turn_count_once_by_their_use(ended):
    for one in ended.end.jobs:
        expected = one.recorded.by_use(one.steps, one.consumed, GROUP)
        undecided = expected.pop(TokenUse.OPEN)
        counted = total(one.progress.usage.values())
        assert {use: getattr(counted, use.value) for use in TokenUse} == dict.fromkeys(TokenUse, 0) | expected
        assert counted.generated_tokens + undecided == one.recorded.num_tokens
        assert (counted.prompt_tokens, counted.cached_tokens) == one.recorded.prompts(one.steps, GROUP)
        assert one.progress.amounts.unrecorded_tokens == max(0, one.progress.tokens - counted.generated_tokens)
    assert sum(one.recorded.num_tokens for one in ended.end.jobs) > 0


def test_the_jobs_of_a_tenant_add_up_to_its_total(ended):
    for tenant, usage in ended.end.tenants.items():
        jobs = [one.progress.amounts for one in ended.end.jobs if one.document.tenant == tenant]
        assert usage.total.model_dump() == pytest.approx(total(jobs).model_dump())


def test_engine_seconds_of_jobs_add_up_to_those_of_the_replicas_and_a_kill_loses_none_that_was_reported(ended):
    reports = [one for one in ended.end.reports if one.role == "rollout"]
    for report in reports:
        assert sum(report.job_engine_s.values()) == pytest.approx(report.busy_s, rel=1e-3)
    for one in ended.end.jobs:
        last = sum(report.job_engine_s.get(one.document.uid, 0.0) for report in reports)
        assert one.progress.amounts.engine_s >= last - 1e-6
        recorded = total(one.progress.usage.values())
        assert 0 < recorded.engine_s <= one.progress.amounts.engine_s + 1e-6, "of recorded turns"
        assert one.progress.amounts.slot_s > 0
    for report in reports:
        assert sum(report.job_slot_s.values()) <= report.slots * report.wall_s
    all_s = sum(one.progress.amounts.engine_s for one in ended.end.jobs)
    assert all_s > sum(report.busy_s for report in reports), "the killed replica's seconds count too"


def test_ended_jobs_leave_their_results_and_no_work(ended):
    end = ended.end
    keys = {one.document.ref.key for one in end.jobs}
    agents = {f"{key}.policy" for key in keys}
    waiting = KEPT.replace("/", ".")
    assert end.keys[subjects.JOBS] == end.keys[subjects.PROGRESS] == {*keys, waiting}
    assert (end.keys[subjects.LEDGER], end.keys[subjects.POLICY]) == (keys, agents)
    assert end.messages[subjects.TASKS] == end.messages[subjects.TURNS] == []
    last = Counter(one.subject for one in end.messages[subjects.GROUPS])
    assert last == {f"group.{agent}": 1 for agent in agents}, "the end of the last step"
    readers = {f"{waiting.replace('.', '_')}_reader"}
    roles = ("orchestrator", "reader", "sandbox")
    assert end.consumers == readers | {f"{key.replace('.', '_')}_{role}" for key in keys for role in roles}


def test_slots_and_files_of_adapters_are_those_of_the_versions_that_are_held(ended):
    for one in ended.end.reports:
        if one.role == "rollout":
            assert len(one.verified) <= one.slots == 3
            assert ended.end.held[one.replica] == set(one.verified)


def test_no_blob_is_left_that_no_version_refers_to(ended):
    assert ended.end.blobs == {name for one in ended.end.jobs for name in one.blobs(KEPT_STATES)}
