"""A job is changed while it is there: suspended and resumed; and it goes by itself, with or without its adapter."""

import collections

import pytest

from marlaas_e2e.api import Object
from marlaas_e2e.handle import NotHere
from marlaas_e2e.kubectl import CommandFailed
from marlaas_e2e.platform import Platform, endless, model_cache, plain_pool, tenant

TEAM = "team-j"
RETENTIONS = {"kept": "keep", "dropped": "delete"}


def begin(_: Platform) -> list[Object]:
    once = {"training": {"steps": 1}, "ttlSecondsAfterFinished": 1}
    leaving = [endless(name, TEAM, adapterRetention=how, **once) for name, how in RETENTIONS.items()]
    return [*plain_pool(), *tenant(TEAM), endless("pausing", TEAM), *leaving]


def told(platform: Platform, name: str) -> collections.Counter[str]:
    """How often each reason was told of a job, as `kubectl describe` shows it."""
    listed = platform.cluster.get("events", "-n", TEAM)["items"]
    return collections.Counter(event["reason"] for event in listed if event["involvedObject"]["name"] == name)


def test_a_suspended_job_frees_what_it_holds_and_goes_on_from_where_it_was(platform):
    platform.until(lambda: platform.step("pausing", TEAM), "the first step", 600)
    assert "suspend" in platform.marlaas("suspend", "pausing", "-n", TEAM)
    suspended = lambda: platform.status("rljob", "pausing", TEAM)["phase"] == "Suspended"  # noqa: E731
    platform.until(suspended, "the job is suspended", 180)
    platform.until(lambda: not platform.owned(TEAM, "marlaas.dev/job=pausing"), "its sandbox is gone")
    assert platform.condition("rljob", "pausing", "Admitted", TEAM)["status"] == "False"
    before = platform.step("pausing", TEAM)
    assert "suspended" in platform.why("pausing", TEAM)
    platform.marlaas("resume", "pausing", "-n", TEAM)
    platform.until(lambda: platform.step("pausing", TEAM) > before, "it goes on from its last step", 300)
    story = {"Admitted": 2, "SandboxReady": 2, "Suspended": 1}
    platform.until(lambda: told(platform, "pausing") == story, "each of its five transitions is told once")
    platform.kubectl("delete", "rljob", "pausing", "-n", TEAM, "--wait=false")


def test_a_job_goes_by_itself_and_its_adapter_as_it_says(platform):
    for name in RETENTIONS:
        platform.until(lambda name=name: not platform.get("rljob", name, TEAM), f"{name} has gone", 300)  # type: ignore[misc]
    program = f"import pathlib; print(*pathlib.Path('/var/lib/marlaas/blobs/{TEAM}').rglob('*.safetensors'))"
    files = platform.python("plain-trainer-0", "trainer", program).split()
    assert any(f"/{TEAM}/kept/" in file and file.endswith("adapter_model.safetensors") for file in files), files
    assert not any(f"/{TEAM}/dropped/" in file for file in files), files


def test_the_model_comes_from_a_volume_which_no_worker_can_write(platform):
    if not model_cache():
        raise NotHere("the model's volume is a folder of this machine, which the workers of E2E_WORKER do not see")
    platform.pool_ready("plain")
    assert platform.status("modelpool", "plain")["model"].startswith("model-cache:/models/tiny-")
    for role in ("rollout", "trainer"):
        with pytest.raises(CommandFailed, match="Read-only file system"):
            platform.python(f"plain-{role}-0", role, "open('/model/x', 'w')")
