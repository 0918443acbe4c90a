"""State of the jobs on a replica: what outlives a job's document, estimates of output lengths, and caches that are bounded in bytes."""

from tests.tables import rows

from marlaas_api.names import JobRef
from marlaas_worker.rollout.served_jobs import GONE_S, BoundedCache, CacheBound, RecentOutputs, ServedJobs


def job_ref(uid):
    return JobRef("team-a", "sums", uid)


def test_everything_of_a_job_is_dropped_when_its_document_has_been_gone_for_a_minute():
    jobs = ServedJobs()
    for present, used, (seconds, times), expired in rows(__file__, "gone_jobs"):
        for uid in used:
            jobs.of(job_ref(uid)).pins.put(("policy", f"{uid}-t0"), 1, 100)
        dropped = jobs.drop_gone({job_ref(uid) for uid in present}, seconds + times * GONE_S)
        assert {job.ref.uid for job in dropped} == set(expired), (seconds, times)
        assert jobs.bounds.pins.num_bytes == 100 * len(jobs)
    assert {job.ref.uid for job in jobs} == {"b"}


def test_the_length_of_outputs_is_estimated_from_the_last_64():
    outputs = RecentOutputs()
    for number in (*[900] * 64, *range(1, 65)):
        outputs.note(number)
    assert outputs.expected_tokens(1000) == 58
    assert outputs.expected_tokens(4) == 4
    assert RecentOutputs().expected_tokens(1000) == 1000


def test_caches_are_bounded_in_bytes_together_and_evict_the_least_recently_used():
    bound = CacheBound(100)
    cache, other = BoundedCache(bound), BoundedCache(bound)
    for key, num_bytes in (("a", 40), ("b", 30), ("c", 30)):
        cache.put(key, num_bytes, num_bytes)
    assert (cache.get("a"), bound.num_bytes) == (40, 100)
    other.put("d", 50, 50)
    assert ([key in cache for key in "abcd"], cache.get("b"), bound.num_bytes) == (
        [True, False, False, False],
        None,
        90,
    )
    cache.put("a", "new", 45)
    assert (cache.get("a"), bound.num_bytes, len(cache), len(other)) == ("new", 95, 1, 1)
    bound.trim(lambda value: value == 50)
    assert (other.get("d"), cache.get("a"), bound.num_bytes) == (None, "new", 45)
    other.put("d", 1, 1)
    other.clear()
    assert (len(other), bound.num_bytes) == (0, 45)
    cache.put("large", 2, 500)
    assert (cache.get("a"), cache.get("large"), bound.num_bytes) == (None, 2, 500), "one is kept, however large"
