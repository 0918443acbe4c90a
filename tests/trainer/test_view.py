"""What is there, and which of it a pool's trainers have to train."""

import pytest
from tests.harness import a_progress
from tests.trainer.harness import TrainerHarness
from tests.trainer.jobs import job

from marlaas_api import subjects
from marlaas_api.messages import Phase, PolicyRecord
from marlaas_worker.trainer.assignment import assignments
from marlaas_worker.trainer.view import TrainerCaches, View


@pytest.mark.parametrize(
    ("job_changes", "progress_changes", "wanted"),
    [
        ({}, {}, True),
        ({"deleted": True}, {}, False),
        ({"pool": "large"}, {}, False),
        ({}, {"admitted": False}, False),
        ({}, {"uid": "uid-earlier"}, False),
        ({}, {"phase": Phase.SUCCEEDED}, False),
        ({}, {"phase": Phase.FAILED}, False),
        ({"agent": {"poolRef": {"name": "large"}}}, {}, False),
    ],
)
def test_wanted_are_the_agents_of_admitted_unfinished_jobs_of_the_pool(job_changes, progress_changes, wanted):
    own = job_changes.get("agent")
    document = job(agent=own) if own else job().model_copy(update=job_changes)
    progress = {document.ref.key: a_progress(document, **progress_changes)}
    assert list(assignments([document], progress, "tiny")) == (["team-a.sums.policy"] if wanted else [])
    assert bool(assignments([document], progress, "large")) == bool({"pool", "agent"} & job_changes.keys())
    assert assignments([document], {}, "tiny") == {}


async def view_of(harness: TrainerHarness) -> View:
    caches = TrainerCaches(harness.bus, "tiny", lambda: None)
    await caches.load()
    return caches.view()


async def test_a_view_has_jobs_records_and_live_trainers_and_leaves_out_agents_with_unreadable_records(harness):
    good, bad = job("good"), job("bad")
    for document in (good, bad):
        await harness.admit(document)
    record = PolicyRecord(uid=good.uid, epoch=2, holder="trainer-7")
    await harness.put_policy(record, good)
    await (await harness.bus.bucket(subjects.POLICY)).put(harness.policy_key(bad), b"nonsense")
    await (await harness.bus.bucket(subjects.JOBS)).put("team-a.worse", b"nonsense")
    replicas = await harness.bus.bucket(subjects.REPLICAS)
    for key in (("trainer", "tiny", "trainer-7"), ("trainer", "large", "trainer-8"), ("rollout", "tiny", "rollout-0")):
        await replicas.put(subjects.replica_key(*key), b"a report")
    view = await view_of(harness)
    assert list(view.wanted) == ["team-a.good.policy"]
    assert view.known["team-a.good.policy"].record == record
    assert view.live == {"trainer-7"}
    assert view.holders == {"trainer-7"}


async def test_only_changes_that_matter_wake_the_trainer_and_a_deleted_job_is_not_wanted(harness):
    woken: list[int] = []
    caches = TrainerCaches(harness.bus, "tiny", lambda: woken.append(1))
    for name in ("a", "b"):
        await harness.admit(job(name))
    await caches.load()
    assert len(caches.view().wanted) == 2
    num_woken = len(woken)
    await harness.put(subjects.PROGRESS, "team-a.b", a_progress(job("b"), step=2))
    await caches.load()
    assert len(woken) == num_woken
    await (await harness.bus.bucket(subjects.JOBS)).delete("team-a.a")
    await caches.load()
    assert len(woken) == num_woken + 1
    assert list(caches.view().wanted) == ["team-a.b.policy"]
    assert caches.view() == await view_of(harness)
