"""Sixteen jobs of four tenants on few slots, one of them a team, some preempted, and one process of each kind killed: exact, and nothing left."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.loop.crowd import KEPT, SLOTS, Crowd, crowd, job, kept, pool
from tests.loop.crowd_end import End, read_end

from marlaas_api import subjects
from marlaas_api.messages import Phase
from marlaas_api.messages.usage import total

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

KILLED = "rollout-1"
VICTIMS = ("orchestrator", KILLED, "trainer-0", "nats-server")
STEPS_BETWEEN = 6
"""Steps that the jobs finish after a kill before the next one."""
EARLY, LATE = 18, 2
"""Steps of the jobs that start first, and of those that preempt some of them. The first must outlast `marlaas submit`, about 4 s."""
TEAM, AGENTS = "team-b/job-3", ("solver", "verifier")
TEAM_STEPS = 12
"""An early asynchronous job with two agents. It has fewer steps, since each trains both."""
LATE_S = 3.0
"""Engine seconds that a job may lose at the kill if it was preempted before: of its last turns, reported after it had left."""
GROUP, GROUPS, MAX_RESOLVED = 4, 2, 6
"""Members of a group, groups of a full step, and resolved groups after which a step closes although it is not full."""
KEPT_STATES = 2


def names(teams: str) -> list[str]:
    return [f"team-{team}/job-{number}" for team in teams for number in range(4)]


@dataclass(frozen=True)
class Ended:
    """The end of a run. unfinished: jobs that had not ended at the last kill."""

    end: End
    run: Crowd
    code: int
    unfinished: set[str]

    @property
    def unreported_s(self) -> float:
        """Seconds between the last report of the killed replica and its kill."""
        return self.run.killed_at - self.run.before_kill[KILLED].at

    @property
    def uncharged_s(self) -> float:
        """Engine seconds at the last report of the killed replica that it had charged to no job: of unfinished requests."""
        killed = self.run.before_kill[KILLED]
        return killed.busy_s - sum(killed.job_engine_s.values())


async def play(run: Crowd, submit: Callable[[], Awaitable[None]]) -> set[str]:
    """Let late tenants preempt early ones, and kill one process after another. Return the jobs that outlive the last kill."""
    await run.until(lambda: sum(line.get("step", 0) > 0 for line in run.seen.values()) >= 4)
    await submit()
    await run.until(lambda: bool(run.preempted))
    for victim in VICTIMS:
        await run.kill(victim)
        unfinished = {name for name, phase in run.phases().items() if not Phase(phase).final}
        goal = run.steps + STEPS_BETWEEN
        await run.until(lambda goal=goal: run.steps >= goal)
    await run.until(lambda: len(run.phases()) == 16 and all(Phase(one).final for one in run.phases().values()))
    return unfinished


async def run_to_end(model: Path, folder: Path) -> Ended:
    early, late = (
        [job(name, steps, n % 2) for n, name in enumerate(names(teams))]
        for teams, steps in (("ab", EARLY), ("cd", LATE))
    )
    early[names("ab").index(TEAM)] = job(TEAM, TEAM_STEPS, 1, AGENTS)
    async with crowd(folder, pool(model), *early, *kept()) as run:
        unfinished = await play(run, lambda: run.submit(pool(model), *late))
        end = await read_end(run, *names("abcd"))
        return Ended(end, run, await run.end(), unfinished)


@pytest.fixture(scope="module")
def ended(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return asyncio.run(run_to_end(tiny_model, tmp_path_factory.mktemp("crowd")))


def test_all_jobs_end_well_although_some_were_preempted_and_processes_killed(ended):
    assert ended.code == 0
    assert {one.progress.phase for one in ended.end.jobs} == {Phase.SUCCEEDED}
    assert ended.run.preempted
    assert TEAM in ended.unfinished


def test_every_index_is_in_one_record_and_every_step_is_full_and_trains_each_agent_once(ended):
    for one in ended.end.jobs:
        assert [step.step for step in one.steps] == list(range(one.document.spec.training.steps))
        indices = [index for step in one.steps for index in step.indices]
        assert sorted(indices) == sorted(set(indices))
        assert all(step.num_groups == GROUPS or len(step.indices) >= MAX_RESOLVED for step in one.steps)
        trained = set[str]()
        for agent in one.manifests:
            versions, consumed = one.versions(agent), one.consumed(agent)
            parts = [(step, step.agents[agent]) for step in one.steps if step.agents[agent].num_groups]
            assert [made.version for made in versions] == list(range(1 + len(parts)))
            assert [(made.step, made.version) for made in versions[1:]] == [(s.step, part.version) for s, part in parts]
            assert [len(made.consumed) for made in versions[1:]] == [part.num_groups for _, part in parts]
            assert len(consumed) == len(set(consumed))
            trained |= set(consumed)
        assert len(trained) == sum(step.num_groups for step in one.steps)
        assert max(step.staleness_max for step in one.steps) <= one.document.spec.training.max_staleness


def test_the_tokens_of_every_recorded_turn_count_once_by_their_use(ended):
    for one in ended.end.jobs:
        for agent, recorded in one.recorded.items():
            counted = one.progress.usage[agent]
            recorded.check(counted, one.steps, one.consumed(agent), GROUP)
            assert counted.generated_tokens > 0
        generated = total(one.progress.usage.values()).generated_tokens
        rest = max(0, one.progress.tokens - generated)
        assert one.progress.amounts.unrecorded_tokens == rest - min(rest, one.progress.preempted_tokens)


def test_seconds_of_sandboxes_are_those_of_the_recorded_episodes_in_equal_parts_for_the_agents(ended):
    for one in ended.end.jobs:
        for agent, recorded in one.recorded.items():
            expected = recorded.sandbox_s(one.steps, GROUP) / len(one.recorded)
            assert expected > 0
            assert one.progress.usage[agent].sandbox_s == pytest.approx(expected)


def test_seconds_of_trainers_are_those_in_the_manifests_of_their_versions(ended):
    """The trainer that lives to the end has reported no fewer than its versions took."""
    (living,) = (one for one in ended.end.reports if one.replica == "trainer-1")
    for one in ended.end.jobs:
        every = [made for agent in one.manifests for made in one.versions(agent)]
        for agent, used in one.progress.usage.items():
            expected = sum(made.train_s for made in every if made.agent == agent)
            assert expected > 0
            assert used.trainer_s == pytest.approx(expected)
        assert one.progress.amounts.trainer_s == pytest.approx(sum(made.train_s for made in every))
        own = sum(made.train_s for made in every if made.trainer == living.replica)
        assert own <= living.job_engine_s.get(one.document.uid, 0.0) + 1e-6


def test_stored_bytes_are_those_of_the_files_in_the_blob_store(ended):
    for one in ended.end.jobs:
        for agent, used in one.progress.usage.items():
            assert used.stored_bytes == sum(ended.end.blobs[name] for name in one.blobs(KEPT_STATES, agent)) > 0
        assert one.progress.amounts.stored_bytes == total(one.progress.usage.values()).stored_bytes


def test_the_jobs_of_a_tenant_add_up_to_its_total(ended):
    for tenant, usage in ended.end.tenants.items():
        jobs = [one.progress.amounts for one in ended.end.jobs if one.document.tenant == tenant]
        assert usage.total.model_dump() == pytest.approx(total(jobs).model_dump())


def test_engine_seconds_of_jobs_are_those_that_the_replicas_reported_also_before_a_kill(ended):
    """Turns that were recorded between the last report and the kill count too, with their seconds before the report."""
    reports = [one for one in ended.end.reports if one.role == "rollout"]
    for report in reports:
        assert sum(report.job_engine_s.values()) == pytest.approx(report.busy_s, rel=1e-3)
    killed = ended.run.before_kill[KILLED]
    unreported_s = ended.unreported_s + ended.uncharged_s
    for one in ended.end.jobs:
        uid, found = one.document.uid, one.progress.amounts.engine_s
        reported = sum(report.job_engine_s.get(uid, 0.0) for report in (*reports, killed))
        late_s = LATE_S if one.name in ended.run.preempted else 0.0
        assert reported - late_s - 1e-6 <= found <= reported + unreported_s + 1e-6
        recorded = total(one.progress.usage.values())
        assert 0 < recorded.engine_s <= found + 1e-6, "of recorded turns"


def test_slot_seconds_are_at_least_those_of_the_turns_and_at_most_those_that_the_replicas_reported(ended):
    """A version of an ended job keeps its slot until another version needs it. These seconds are charged to no agent."""
    reports = [one for one in ended.end.reports if one.role == "rollout"]
    for report in reports:
        every_s = sum(seconds for agents in report.agent_slot_s.values() for seconds in agents.values())
        assert every_s <= report.slots * report.wall_s
    for one in ended.end.jobs:
        said = [report.agent_slot_s.get(one.document.uid, {}) for report in (*reports, ended.run.before_kill[KILLED])]
        assert one.progress.usage.keys() == one.recorded.keys()
        for agent, recorded in one.recorded.items():
            used_s, slot_s = recorded.slot_s(), one.progress.usage[agent].slot_s
            assert 0 < used_s <= slot_s + LATE_S + ended.unreported_s  # a killed replica had not reported its last ones
            assert slot_s <= sum(agents.get(agent, 0.0) for agents in said) + SLOTS * ended.unreported_s
        assert one.progress.amounts.slot_s == total(one.progress.usage.values()).slot_s


def test_ended_jobs_leave_their_results_and_no_work(ended):
    end = ended.end
    keys = {one.document.ref.key for one in end.jobs}
    agents = {f"{one.document.ref.key}.{agent}" for one in end.jobs for agent in one.manifests}
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
            assert len(one.verified) <= one.slots == SLOTS
            assert ended.end.held[one.replica] == set(one.verified)


def test_no_blob_is_left_that_no_version_refers_to(ended):
    parts = [one.blobs(KEPT_STATES, agent) for one in ended.end.jobs for agent in one.manifests]
    assert set(ended.end.blobs) == set[str]().union(*parts)
