"""Agents are divided among trainers by the computing time that they have used recently."""

from collections.abc import Mapping

import pytest
from tests.harness import WITHIN_S, a_progress
from tests.trainer.harness import TrainerHarness
from tests.trainer.jobs import job

from marlaas_api import subjects
from marlaas_api.messages import PolicyRecord, ReplicaReport
from marlaas_worker.trainer.recent_work import HALF_LIFE_S, MIN_PART, PRIOR_S, RecentWork, recent_costs
from marlaas_worker.trainer.view import TrainerCaches

COSTS = {"a": 0.08, "b": 0.04, "c": 0.02, "d": 0.01}
"""Seconds of computation per second."""
LONG = 100 * HALF_LIFE_S


def test_work_counts_half_after_ten_minutes_so_an_agent_that_pauses_between_steps_is_not_idle() -> None:
    work = RecentWork(0.0)
    work.advance({"a": 64.0}, ["a"], 100.0)
    assert work.advance({"a": 64.0}, ["a"], 100.0 + HALF_LIFE_S)["a"] == (32.0, 50.0 + HALF_LIFE_S)
    assert work.advance({"a": 64.0}, [], 100.0 + 2 * HALF_LIFE_S)["a"] == (16.0, 325.0)
    assert work.advance({"a": 64.0}, [], LONG) == {}


def test_a_total_that_has_become_smaller_begins_anew_and_work_of_jobs_that_are_gone_is_dropped() -> None:
    """The figures of a job are dropped, and a job of its name is created again."""
    work = RecentWork(0.0)
    work.advance({"n.j.a": 64.0, "n.gone.a": 1.0}, ["n.j.a", "n.gone.a"], 0.0)
    assert work.advance({"n.j.a": 8.0}, ["n.j.a"], 2.0)["n.j.a"][0] == pytest.approx(72.0, rel=0.01)
    work.keep({"n.j"})
    assert work.advance({}, [], 2.0).keys() == {"n.j.a"}


def test_a_new_agent_counts_as_the_mean_and_one_without_work_a_little() -> None:
    work = {"a": (90.0, 1000.0), "idle": (0.0, 1000.0)}
    found = recent_costs(["a", "idle", "new"], [work])
    mean = 90.0 / 2000.0
    assert found["new"] == pytest.approx(mean)
    assert found["idle"] == pytest.approx(MIN_PART * mean)
    assert found["a"] == pytest.approx((90.0 + PRIOR_S * mean) / (1000.0 + PRIOR_S))
    assert recent_costs(["a", "b"], [{"a": (0.0, 1000.0)}]) == {"a": 1.0, "b": 1.0}
    assert recent_costs(["a", "b"], []) == {"a": 1.0, "b": 1.0}
    assert recent_costs([], [work]) == {}


async def placed(harness: TrainerHarness, names: str, on: Mapping[str, str]) -> dict[str, str]:
    """Who has which agent, as two trainers compute it, which report that all agents have their costs. on: the holders."""
    documents = {name: job(name) for name in names}
    keys = {name: harness.policy_key(document) for name, document in documents.items()}
    for name, document in documents.items():
        await harness.put(subjects.JOBS, document.ref.key, document)
        await harness.put(subjects.PROGRESS, document.ref.key, a_progress(document))
        await harness.put_policy(PolicyRecord(uid=document.uid, holder=on[name]), document)
    for trainer in ("trainer-0", "trainer-1"):
        work = {keys[name]: (COSTS[name] * LONG, LONG) for name in names if on[name] == trainer}
        report = ReplicaReport(role="trainer", pool="tiny", replica=trainer, agent_work=work)
        await harness.put(subjects.REPLICAS, subjects.replica_key("trainer", "tiny", trainer), report)
    caches = TrainerCaches(harness.bus, "tiny", lambda: None)
    await caches.load()
    view = caches.view()
    found = {trainer: view.placed_on(trainer, ()) for trainer in ("trainer-0", "trainer-1")}
    return {name: trainer for name in names for trainer, agents in found.items() if keys[name] in agents}


async def test_two_trainers_divide_agents_by_their_cost_and_no_agent_moves_again(harness: TrainerHarness) -> None:
    """8 + 4 and 2 + 1 become 8 and 4 + 2 + 1, though each trainer has two agents before."""
    first = {"a": "trainer-0", "b": "trainer-0", "c": "trainer-1", "d": "trainer-1"}
    after = await placed(harness, "abcd", first)
    assert after == {"a": "trainer-0", "b": "trainer-1", "c": "trainer-1", "d": "trainer-1"}
    assert await placed(harness, "abcd", after) == after


async def test_trainers_report_the_work_of_their_agents(harness: TrainerHarness) -> None:
    document = job()
    async with harness.training(document):
        await harness.play(document, 1)
        key = harness.policy_key(document)
        report = await harness.report(lambda found: key in found.agent_work and found.agent_work[key][0] > 0)
        busy_s, bound_s = report.agent_work[key]
        assert 0 < busy_s < bound_s < WITHIN_S
