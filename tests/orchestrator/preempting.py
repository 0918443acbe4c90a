"""Jobs of two tenants in a pool that has room for one of them: the second one preempts the first."""

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.harness import changed, working
from tests.orchestrator.harness import OrchestratorHarness, final, mixed
from tests.orchestrator.test_admitted import of

from marlaas_api.messages import (
    JobDocument,
    Meter,
    Progress,
    UsageAmounts,
)
from marlaas_worker.orchestrator import preemption


class OneJobAtATime(OrchestratorHarness):
    """An engine whose KV cache one job fills, and that reports the tokens which it has generated, and which a preemption cut."""

    meter, turn_bytes = Meter(prompt_tokens=20, cached_tokens=16, output_tokens=5, share_s=0.5), 8

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        self.cut: Counter[str] = Counter()

    async def put_report(self, role: str = "rollout", replica: str = "rollout-0", **fields: Any) -> None:
        used = {"job_tokens": self.generated, "job_engine_s": seconds(self.generated)}
        cut = {"job_preempted_tokens": self.cut, "job_preempted_engine_s": seconds(self.cut)}
        await super().put_report(role, replica, **{**fields, "kv_tokens": 1, **used, **cut})

    async def charged(self, job: JobDocument) -> UsageAmounts:
        """The usage of a job that has ended, with what the engine reports last; without its time of admission."""
        await self.report(job, job.spec.training.steps)
        level = await self.progress(job, lambda level: level.phase.final and level.tokens >= self.generated[job.uid])
        return level.amounts.model_copy(update={"admitted_s": 0.0})


def seconds(tokens: Counter[str]) -> dict[str, float]:
    return {uid: number / 10 for uid, number in tokens.items()}


async def another(scratch: Path) -> OneJobAtATime:
    made = OneJobAtATime(scratch)
    await made.bus.ensure()
    return made


async def preempting(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> OneJobAtATime:
    """A harness in which jobs may be preempted as soon as they run."""
    monkeypatch.setattr(preemption, "MIN_RUN_S", 0.0)
    return await another(scratch)


def workers(
    harness: OrchestratorHarness, document: JobDocument, *, sandbox: bool = True
) -> contextlib.AbstractAsyncContextManager[None]:
    """The job's trainer and sandbox."""
    return working(harness.train(document), *([harness.play(document, mixed)] if sandbox else []))


def heavy(document: JobDocument) -> JobDocument:
    """A job of a tenant of weight 2: in a pool of one job, its share is half of that of a tenant of weight 1."""
    return of(document, "team-b").model_copy(update={"job": "other", "tenant_weight": 2.0})


async def outweighed(harness: OrchestratorHarness, job: JobDocument, other: JobDocument) -> None:
    """Submit the other job in the middle of the third step; the trainer waits until the orchestrator has decided."""
    await harness.progress(job, lambda level: level.step >= 2)
    await harness.submit(other)
    await harness.progress(other, lambda level: level.reason == "WaitingForMemory")
    harness.may_train.set()


async def undisturbed(scratch: Path, job: JobDocument) -> tuple[OneJobAtATime, UsageAmounts]:
    harness = await another(scratch / "undisturbed")
    await harness.report(job, -1)
    async with harness.orchestrating(), workers(harness, job):
        await harness.submit(job)
        await harness.progress(job, final)
        return harness, await harness.charged(job)


async def until_preempted(harness: OrchestratorHarness, job: JobDocument) -> Progress:
    return await harness.progress(job, lambda level: level.reason == "Preempted")


def deleted(job: JobDocument) -> JobDocument:
    return changed(job).model_copy(update={"deleted": True})
