from marlaas_worker.rollout.templates import REASON


async def test_a_job_hears_that_the_template_rewrites_its_past(harness):
    await harness.replica(trims=True)
    job = await harness.job()
    event = await harness.emitted(job.document, REASON)
    assert event.ref == job.document.ref
    assert "rewrites its past after a reply with spaces" in event.message
