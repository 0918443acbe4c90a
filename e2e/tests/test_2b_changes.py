"""A job is changed while it is there: suspended and resumed, given more steps and less time; and it goes by itself, with or without its adapter."""

import collections
import copy
import json

import pytest

from marlaas_e2e.api import Object
from marlaas_e2e.kubectl import CommandFailed
from marlaas_e2e.platform import NAMESPACE, Platform, manifest

TEAM = "team-j"
OWNED = "deployments,networkpolicies,secrets,serviceaccounts,pods"


def job(name: str, steps: int, **spec: object) -> Object:
    (body,) = copy.deepcopy(manifest("endless"))
    body["metadata"] = {"name": name, "namespace": TEAM}
    body["spec"] |= {"evaluation": {"tasks": 0}, **spec}
    body["spec"]["training"] |= {"steps": steps, "maxStaleness": 0}
    return body


def marlaas(platform: Platform, *words: str) -> str:
    """What a command of `kubectl marlaas` says."""
    return platform.marlaas(*words, "--namespace", TEAM)


def patch(platform: Platform, name: str, spec: Object) -> None:
    body = json.dumps({"spec": spec})
    platform.kubectl("patch", "rljob", name, "-n", TEAM, "--type=merge", "--patch", body)


def step(platform: Platform, name: str) -> int:
    return int(platform.status("rljob", name, TEAM).get("step") or 0)


def told(platform: Platform, name: str) -> collections.Counter[str]:
    """How often each reason was told of a job, as `kubectl describe` shows it."""
    listed = platform.cluster.get("events", "-n", TEAM)["items"]
    return collections.Counter(event["reason"] for event in listed if event["involvedObject"]["name"] == name)


@pytest.fixture(scope="module", autouse=True)
def team(platform: Platform) -> None:
    """A pool that serves, a namespace, and the jobs that need no hand while others are looked at."""
    platform.tiny_pool()
    platform.tenant(TEAM)
    platform.apply(job("late", 10_000, activeDeadlineSeconds=5), job("brief", 2), job("pausing", 10_000))


def test_a_suspended_job_frees_what_it_holds_and_goes_on_from_where_it_was(platform: Platform) -> None:
    platform.until(lambda: step(platform, "pausing"), "the first step", 300)
    assert "suspend" in marlaas(platform, "suspend", "pausing")
    suspended = lambda: platform.status("rljob", "pausing", TEAM)["phase"] == "Suspended"  # noqa: E731
    platform.until(suspended, "the job is suspended", 180)
    platform.until(lambda: not platform.names(OWNED, TEAM, "marlaas.dev/job=pausing"), "its sandbox is gone")
    assert platform.condition("rljob", "pausing", "Admitted", TEAM)["status"] == "False"
    before = step(platform, "pausing")
    assert "suspended" in platform.why("pausing", TEAM)
    marlaas(platform, "resume", "pausing")
    platform.until(lambda: step(platform, "pausing") > before, "it goes on from its last step", 300)
    story = {"Admitted": 2, "SandboxReady": 2, "Suspended": 1}
    platform.until(lambda: told(platform, "pausing") == story, "each of its five transitions is told once", 120)
    platform.kubectl("delete", "rljob", "pausing", "-n", TEAM, "--timeout=120s")


def test_a_finished_job_that_is_given_more_steps_takes_them_and_fewer_are_refused(platform: Platform) -> None:
    assert platform.ended("brief", TEAM, 300)["step"] == 2
    with pytest.raises(CommandFailed, match="may be raised but not lowered: finished steps cannot be undone"):
        patch(platform, "brief", {"training": {"steps": 1}})
    patch(platform, "brief", {"training": {"steps": 4}})
    platform.until(lambda: step(platform, "brief") == 4, "two more steps", 300)
    status = platform.ended("brief", TEAM, 300)
    assert (status["phase"], status["progress"]) == ("Succeeded", "4/4"), status


def test_a_job_that_is_over_its_time_fails_and_says_so(platform: Platform) -> None:
    status = platform.ended("late", TEAM, 180)
    assert (status["phase"], status["reason"]) == ("Failed", "DeadlineExceeded"), status
    assert "5 s" in status["message"]


def test_a_job_goes_by_itself_and_its_adapter_as_it_says(platform: Platform) -> None:
    retentions = {"kept": "keep", "dropped": "delete"}
    jobs = [job(name, 1, adapterRetention=how, ttlSecondsAfterFinished=1) for name, how in retentions.items()]
    platform.apply(*jobs)
    for name in retentions:
        platform.until(lambda name=name: not platform.get("rljob", name, TEAM), f"{name} has gone", 300)  # type: ignore[misc]
    find = ("find", f"/var/lib/marlaas/blobs/{TEAM}", "-type", "f")
    files = platform.kubectl("exec", "-n", NAMESPACE, "tiny-trainer-0", "-c", "trainer", "--", *find).splitlines()
    assert any(f"/{TEAM}/kept/" in file and file.endswith("adapter_model.safetensors") for file in files), files
    assert not any(f"/{TEAM}/dropped/" in file for file in files), files
