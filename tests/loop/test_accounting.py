"""What jobs used and left: every token, second and byte is counted once, after kills at every failpoint and after preemptions."""

from collections import Counter

import pytest
from tests.loop.runs import KEPT_STATES, SLOTS

from marlaas_api import subjects
from marlaas_api.messages import Phase
from marlaas_api.messages.usage import total

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1800)]

ACCOUNTED = ("team", "solo", "bases", "again", "late")
"""Jobs among the killed ones whose agents all have policies of their own, which they train."""


@pytest.fixture(params=["killed", "crowd"])
def jobs(request):
    found = request.getfixturevalue(request.param).jobs
    if request.param == "killed":
        return [found[name] for name in ACCOUNTED]
    return [one for one in found.values() if one.progress.phase is Phase.SUCCEEDED]


def test_every_index_is_in_one_record_and_every_step_trains_each_agent_once(jobs):
    for job in jobs:
        assert [step.step for step in job.steps] == list(range(job.document.spec.training.steps))
        indices = [index for step in job.steps for index in step.indices]
        if job.document.spec.training.data is None:
            assert sorted(indices) == list(range(len(indices)))
        assert max(step.staleness_max for step in job.steps) <= job.document.spec.training.max_staleness
        trained = set[str]()
        for agent, versions in job.histories.items():
            parts = [(step, step.agents[agent]) for step in job.steps if step.agents[agent].num_groups]
            assert [made.version for made in versions] == list(range(1 + len(parts)))
            assert [(made.step, made.version) for made in versions[1:]] == [(s.step, part.version) for s, part in parts]
            assert [len(made.consumed) for made in versions[1:]] == [part.num_groups for _, part in parts]
            consumed = job.consumed(agent)
            assert len(consumed) == len(set(consumed)), "no group is trained twice"
            trained |= set(consumed)
        assert len(trained) == sum(step.num_groups for step in job.steps)


def test_the_tokens_of_every_recorded_turn_count_once_by_their_use(jobs):
    for job in jobs:
        for agent, counted in job.progress.usage.items():
            recorded = job.recorded(agent)
            recorded.check(counted, job.steps, job.consumed(agent))
            assert recorded.num_tokens >= counted.generated_tokens > 0
            assert counted.trained_tokens == sum(trained.get(agent, 0) for trained in job.trained)
        generated = total(job.progress.usage.values()).generated_tokens
        rest = max(0, job.progress.tokens - generated)
        assert job.progress.amounts.unrecorded_tokens == rest - min(rest, job.progress.preempted_tokens)


def test_seconds_are_those_of_the_recorded_episodes_and_of_the_manifests(jobs):
    for job in jobs:
        agents = job.progress.usage
        for agent, used in agents.items():
            expected = job.recorded(agent).sandbox_s(job.steps) / len(agents)
            assert used.sandbox_s == pytest.approx(expected)
            train_s = sum(made.train_s for made in job.histories[agent])
            assert used.trainer_s == pytest.approx(train_s)
            assert min(used.sandbox_s, used.engine_s) > 0
        recorded = total(agents.values())
        assert recorded.engine_s <= job.progress.amounts.engine_s + 1e-6, "of recorded turns"


def test_the_jobs_of_a_tenant_and_those_that_it_deleted_add_up_to_its_total(crowd):
    assert len(crowd.tenants) == 4
    for name, usage in crowd.tenants.items():
        amounts = [one.progress.amounts for one in crowd.jobs.values() if one.document.tenant == name]
        expected = total(amounts) + usage.removed
        assert usage.total.model_dump() == pytest.approx(expected.model_dump())


def test_engine_and_slot_seconds_are_those_that_the_replica_reported(crowd):
    """A version of an ended job keeps its slot until another version needs it. These seconds are charged to nobody."""
    (report,) = (one for one in crowd.reports if one.role == "rollout")
    assert sum(report.job_engine_s.values()) == pytest.approx(report.busy_s, rel=1e-3)
    slot_s = [seconds for agents in report.agent_slot_s.values() for seconds in agents.values()]
    assert sum(slot_s) <= report.slots * report.wall_s
    for job in crowd.jobs.values():
        uid, amounts = job.document.uid, job.progress.amounts
        assert amounts.engine_s == pytest.approx(report.job_engine_s[uid])
        assert amounts.slot_s == total(job.progress.usage.values()).slot_s
        for agent, used in job.progress.usage.items():
            assert 0 < job.recorded(agent).slot_s() <= used.slot_s + 1e-6
            assert used.slot_s <= report.agent_slot_s[uid][agent] + 1e-6


def blobs_of(job, agent):
    """The names of the blobs that an agent's versions refer to, manifests included; the newest versions keep their training states."""
    versions = job.histories[agent]
    files = {file.name for made in versions for file in made.files.values()}
    states = {made.state.name for made in versions[-KEPT_STATES:] if made.state is not None}
    return files | states | {ref.name for ref in job.manifests[agent]}


def test_stored_bytes_are_those_of_the_blobs_to_which_versions_refer_and_no_other_is_left(crowd):
    for job in crowd.jobs.values():
        for agent, used in job.progress.usage.items():
            assert used.stored_bytes == sum(crowd.blobs[name] for name in blobs_of(job, agent)) > 0
    needed = {name for job in crowd.jobs.values() for agent in job.histories for name in blobs_of(job, agent)}
    assert set(crowd.blobs) == needed


def test_ended_jobs_leave_their_results_and_no_work_and_a_replica_no_more_versions_than_it_has_slots(crowd):
    keys = {one.document.ref.key for one in crowd.jobs.values()}
    agents = {f"{one.document.ref.key}.{agent}" for one in crowd.jobs.values() for agent in one.histories}
    assert crowd.keys[subjects.JOBS] == crowd.keys[subjects.PROGRESS] == keys
    assert crowd.keys[subjects.POLICY] == agents
    assert crowd.messages[subjects.TASKS] == crowd.messages[subjects.TURNS] == []
    finished = [one.document for one in crowd.jobs.values() if one.progress.phase is Phase.SUCCEEDED]
    logs = Counter(crowd.messages[subjects.GROUPS])
    assert {logs[subjects.job_log(one.namespace, one.job)] for one in finished} == {1}, "the ledger"
    roles = ("orchestrator", "sandbox")
    assert crowd.consumers <= {f"{key.replace('.', '_')}_{role}" for key in keys for role in roles}
    (report,) = (one for one in crowd.reports if one.role == "rollout")
    assert len(report.verified) <= report.slots == SLOTS
