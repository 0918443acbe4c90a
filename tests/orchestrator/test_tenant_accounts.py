"""A tenant's usage is the sum over its jobs, and it does not fall when jobs are deleted, wherever that is interrupted."""

import asyncio
import contextlib
from collections.abc import Awaitable

import pytest
from tests.harness import a_progress, job_document, working
from tests.orchestrator.harness import final, mixed

from marlaas_api import failpoints, subjects
from marlaas_api.bus import BusRefused, BusUnavailable
from marlaas_api.messages import JobVerdict, Progress, TenantUsage, UsageAmounts
from marlaas_worker.orchestrator.owned_job import OwnedJob
from marlaas_worker.orchestrator.progress_store import ProgressStore
from marlaas_worker.orchestrator.running_jobs import RunningJobs
from marlaas_worker.orchestrator.tenant_accounts import TenantAccounts, summed


def a_level(job: str, trained: int, tenant: str = "acme", **fields: object) -> Progress:
    used = UsageAmounts(generated_tokens=trained, trained_tokens=trained, trainer_s=1.0, stored_bytes=99)
    return a_progress(job_document(job), tenant=tenant, usage={"policy": used}, trainer_s=1.0, **fields)


async def test_the_totals_of_tenants_are_the_sums_of_their_jobs(harness):
    levels = [a_level("a", 1), a_level("b", 20, tokens=25), a_level("c", 300, "team-a"), a_level("d", 4000, "")]
    totals = {name: account.total for name, account in summed({}, levels).items()}
    assert list(totals) == ["acme", "namespace/team-a", "team-a"]
    assert (totals["acme"].trained_tokens, totals["acme"].open_tokens) == (21, 5)
    assert totals["acme"].trainer_s == 2.0
    assert totals["team-a"].trained_tokens == 300
    assert totals["namespace/team-a"].trained_tokens == 4000, "without a Tenant, the namespace is a tenant of its own"
    everything = sum((level.amounts for level in levels), UsageAmounts())
    assert sum(totals.values(), UsageAmounts()) == everything
    accounts = TenantAccounts(harness.bus)
    await accounts.save(levels, 100.0)
    await accounts.load()
    assert accounts.totals() == totals


async def test_a_deleted_job_counts_once_however_often_its_deletion_is_repeated(harness):
    gone, stays = a_level("a", 1, tokens=8, admitted_s=3.0), a_level("b", 20)
    accounts = TenantAccounts(harness.bus)
    await accounts.save([gone, stays], 100.0)
    assert accounts.totals()["acme"].open_tokens == 7
    for _ in range(2):
        await accounts.close(gone, {"uid-a", "uid-b"})
    await accounts.save([gone, stays], 200.0)
    restarted = TenantAccounts(harness.bus)
    await restarted.load()
    await restarted.close(gone, {"uid-a", "uid-b"})
    await restarted.save([stays], 200.0)
    total = restarted.totals()["acme"]
    assert (total.trained_tokens, total.open_tokens, total.unrecorded_tokens, total.generated_tokens) == (21, 0, 7, 28)
    assert (total.stored_bytes, total.admitted_s, total.trainer_s) == (99, 3.0, 2.0)


async def test_uids_of_deleted_jobs_are_kept_only_while_their_progress_may_exist(harness):
    accounts = TenantAccounts(harness.bus)
    await accounts.close(a_level("a", 1), {"uid-a", "uid-b"})
    await accounts.close(a_level("b", 20), {"uid-b"})
    account = await harness.get(TenantUsage, subjects.TENANTS, subjects.tenant_usage_key("acme"))
    assert account.removing == ("uid-b",)
    assert account.removed.trained_tokens == 21


async def until_consumers_are_deleted(role: Awaitable[None]) -> None:
    with contextlib.suppress(BusRefused):
        await role


@pytest.mark.parametrize("num_failures", [0, 2])
@pytest.mark.parametrize("change", [{"deleted": True}, {"verdict": JobVerdict(reason="PoolRemoved", message="gone")}])
async def test_a_step_that_is_recorded_just_before_its_job_is_stopped_is_charged(
    harness, document, monkeypatch, change, num_failures
):
    job, submitted, stopped, failed = document(steps=9), [], [], []
    put, end = ProgressStore.put, RunningJobs.stop

    async def stop_and_note(self: RunningJobs, owned: OwnedJob) -> None:
        await end(self, owned)
        stopped.append(owned)

    async def fail_at_first(self: ProgressStore, progress: Progress) -> None:
        if stopped and len(failed) < num_failures:
            failed.append(progress.step)
            raise BusUnavailable("not now")
        await put(self, progress)

    monkeypatch.setattr(RunningJobs, "stop", stop_and_note)
    monkeypatch.setattr(ProgressStore, "put", fail_at_first)

    def stop(name: str) -> None:
        if name == "orchestrator.record.after_step" and not submitted:
            harness.may_train.clear()
            submitted.append(asyncio.ensure_future(harness.submit(job.model_copy(update=change | {"generation": 2}))))

    failpoints.hook = stop
    await harness.report(job, -1)
    await harness.submit(job)
    roles = harness.play(job, mixed), harness.train(job)
    key = subjects.tenant_usage_key(job.tenant)
    async with harness.orchestrating(), working(*(until_consumers_are_deleted(role) for role in roles)):
        if "verdict" in change:
            assert (await harness.progress(job, final)).step == 1
        account = await harness.wait_for(TenantUsage, subjects.TENANTS, key, lambda found: found.total.trainer_s > 0)
    assert (account.total.trainer_s, failed) == (1.5, [1] * num_failures)
