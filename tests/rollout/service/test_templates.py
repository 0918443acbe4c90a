from typing import Any

from marlaas_worker.rollout.templates import REASON


async def test_a_job_hears_that_the_template_rewrites_its_past(harness: Any) -> None:
    await harness.replica(trims=True)
    job = await harness.job()
    event = await harness.story(REASON)
    assert event.ref == job.document.ref
    assert "rewrites its past after a reply with spaces" in event.message
