"""What cannot work says so in the status, with the reason and the container's last error, as a real scheduler, kubelet and kernel report it."""

import pytest
from tests.tables import data

from marlaas_e2e.api import Object
from marlaas_e2e.platform import Platform, endless, manifest, plain_pool, tenant

TEAM = "team-e"
FAULTS = data(__file__, "faults")
POOLS, JOBS, WORDS = FAULTS["pools"], FAULTS["jobs"], FAULTS["words"]


def begin(_: Platform) -> list[Object]:
    (own,) = (each["spec"]["environment"] for each in manifest("own-image") if each["kind"] == "RLJob")
    crash = ["python3", "-c", f"import sys; sys.exit('{WORDS}')"]
    bookless = {"image": own["image"], "entrypoint": crash, "memory": "128Mi"}
    return [
        *plain_pool(),
        *manifest("broken-pools"),
        *tenant(TEAM),
        *(endless(f"on-{pool}", TEAM, poolRef={"name": pool}) for pool in POOLS),
        endless("bookless", TEAM, environment=bookless, backoffLimit=2),
        endless("unloadable", TEAM, environment={"name": "absent_module:Absent"}),
        endless("late", TEAM, activeDeadlineSeconds=5),
    ]


@pytest.mark.parametrize("pool", POOLS)
def test_a_pool_and_its_jobs_say_why_its_workers_are_not_ready(platform, pool):
    for role, (reason, words) in POOLS[pool].items():

        def told(role: str = role, reason: str = reason) -> Object:
            found = platform.condition("modelpool", pool, f"{role}Ready")
            return found if found.get("reason") == reason else {}

        assert words in platform.until(told, f"{role} of {pool} says {reason}", 300)["message"]
    first, _ = POOLS[pool]["Rollout"]
    job = f"on-{pool}"
    platform.until(lambda: platform.status("rljob", job, TEAM).get("reason") == first, f"{job} says {first}")
    assert pool in platform.why(job, TEAM)


@pytest.mark.parametrize("job", JOBS)
def test_a_job_that_cannot_go_on_fails_with_the_reason_and_the_words_of_its_container(platform, job):
    reason, words = JOBS[job]
    status = platform.ended(job, TEAM)
    assert (status["phase"], status["reason"]) == ("Failed", reason), status
    assert words in status["message"]


def test_broken_pools_go_once_their_jobs_have_gone(platform):
    platform.kubectl("delete", "modelpool", *POOLS, "--wait=false")
    told = lambda: platform.condition("modelpool", "absent", "Deleting").get("reason") == "InUse"  # noqa: E731
    platform.until(told, "a pool with a job on it says that it is in use")
    platform.kubectl("delete", "rljob", "--all", "-n", TEAM, "--timeout=120s")
    platform.kubectl("wait", "modelpool/absent", "modelpool/crowded", "--for=delete", "--timeout=300s")
    assert not platform.names("statefulsets", "marlaas-system", "marlaas.dev/pool in (absent,crowded)")
