"""What cannot work says so, in the status, with the reason and the container's own last words."""

import contextlib
import copy

import pytest

from marlaas_e2e.api import Object
from marlaas_e2e.kubectl import CommandFailed
from marlaas_e2e.platform import Platform, manifest

TEAM = "team-e"
REASONS = {"no-image": "ImageCannotBePulled", "no-model": "ModelNotFound", "no-node": "PodUnschedulable"}


def job(name: str, pool: str, environment: str = "reverse") -> Object:
    (body,) = copy.deepcopy(manifest("endless"))
    body["metadata"] = {"name": name, "namespace": TEAM}
    body["spec"] |= {"poolRef": {"name": pool}, "backoffLimit": 2}
    body["spec"]["environment"] = {"name": environment}
    return body


@pytest.fixture(scope="module")
def broken(platform: Platform) -> None:
    """Pools that cannot work, and a job that waits for each."""
    platform.tenant(TEAM)
    platform.apply(*manifest("faults"), *(job(f"on-{pool}", pool) for pool in REASONS))


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(("pool", "reason"), REASONS.items())
def test_a_pool_says_why_it_is_not_ready(platform: Platform, pool: str, reason: str) -> None:
    def told() -> bool:
        return platform.condition("modelpool", pool, "Ready").get("reason") == reason

    platform.until(told, f"pool {pool} says {reason}", 300)


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(("pool", "reason"), REASONS.items())
def test_a_job_that_waits_for_it_says_so_too(platform: Platform, pool: str, reason: str) -> None:
    def told() -> bool:
        return platform.status("rljob", f"on-{pool}", TEAM).get("reason") == reason

    platform.until(told, f"the job on {pool} says {reason}", 180)
    assert pool in platform.why(f"on-{pool}", TEAM)


@pytest.mark.usefixtures("broken")
def test_a_model_that_is_not_there_is_named(platform: Platform) -> None:
    named = lambda: "/models/absent" in platform.condition("modelpool", "no-model", "Ready").get("message", "")  # noqa: E731
    platform.until(named, "the pool names the model that is not there", 120)


def test_an_environment_that_cannot_be_loaded_fails_its_job_with_its_own_words(platform: Platform) -> None:
    platform.tiny_pool()
    platform.tenant(TEAM)
    platform.apply(job("unloadable", "tiny", "absent_module:Absent"))
    status = platform.ended("unloadable", TEAM, 300)
    assert (status["phase"], status["reason"]) == ("Failed", "InvalidEnvironment"), status
    assert "absent_module" in status["message"], status


def test_a_sandbox_that_keeps_dying_fails_its_job_by_its_backoff_limit(platform: Platform) -> None:
    platform.tiny_pool()
    platform.tenant(TEAM)
    platform.apply(job("dying", "tiny"))

    def killed() -> bool:
        """Kill it where it lives; true once the job has had enough."""
        if platform.status("rljob", "dying", TEAM).get("phase") == "Failed":
            return True
        for pod in platform.names("pods", TEAM, "marlaas.dev/job=dying"):
            with contextlib.suppress(LookupError, CommandFailed):
                platform.cluster.kill_container(TEAM, pod.removeprefix("pod/"), "supervisor")
        return False

    platform.until(killed, "a job whose sandbox dies again and again has failed", 300)
    assert platform.status("rljob", "dying", TEAM)["reason"] == "BackoffLimitExceeded"


@pytest.mark.usefixtures("broken")
def test_broken_pools_go_once_their_jobs_have_gone(platform: Platform) -> None:
    platform.kubectl("delete", "modelpool", *REASONS, "--wait=false")
    told = lambda: platform.condition("modelpool", "no-node", "Deleting").get("reason") == "InUse"  # noqa: E731
    platform.until(told, "a pool with a job on it says that it is in use", 180)
    platform.kubectl("delete", "rljob", "--all", "-n", TEAM, "--timeout=120s")
    platform.until(lambda: not platform.get("modelpool", "no-node"), "the pool is gone", 300)
    assert not platform.names("statefulsets", "marlaas-system", "marlaas.dev/pool=no-node")
