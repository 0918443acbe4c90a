"""Deleting a job, and a whole namespace, while it runs: everything goes, nothing hangs."""

import pytest

from marlaas_e2e.api import Object
from marlaas_e2e.platform import Platform, endless, plain_pool, tenant
from marlaas_e2e.step_records import keys

TEAM = "team-f"
JOBS = ("first", "second")


def begin(_: Platform) -> list[Object]:
    return [*plain_pool(), *tenant(TEAM), *(endless(job, TEAM) for job in JOBS)]


@pytest.fixture(scope="module", autouse=True)
def running(platform: Platform) -> None:
    for job in JOBS:
        platform.until(lambda job=job: platform.step(job, TEAM), f"the first step of {job}", 600)  # type: ignore[misc]


def keys_of(platform: Platform, job: str) -> list[str]:
    return [key for key in keys(platform, f"{TEAM}.") if job in key.split(".")]


def test_a_running_job_that_is_deleted_leaves_nothing(platform):
    job, _ = JOBS
    assert keys_of(platform, job)
    platform.kubectl("delete", "rljob", job, "-n", TEAM, "--timeout=120s")
    platform.until(lambda: not platform.owned(TEAM, f"marlaas.dev/job={job}"), "its sandbox is gone")
    assert not keys_of(platform, job)


def test_a_namespace_that_is_deleted_takes_its_job_along(platform):
    assert keys(platform, f"{TEAM}.")
    platform.kubectl("delete", "namespace", TEAM, "--timeout=180s")
    # It is bound to the claim that went along: on a kept cluster a new claim of that name would wait for ever.
    platform.kubectl("delete", "persistentvolume", f"python-environment-{TEAM}", "--ignore-not-found")
    assert not keys(platform, f"{TEAM}.")
