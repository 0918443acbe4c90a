"""Containers that end by themselves: their own last words are in the status within seconds, of a sandbox and of a trainer."""

import copy
from collections.abc import Iterator

import pytest

from marlaas_e2e.api import Object
from marlaas_e2e.platform import Platform, manifest

TEAM, POOL = "team-l", "no-room"
WORDS = "the rule book of chess is missing"
SECONDS = 180
"""What a pod on this machine takes to begin and to end, and a status to follow."""


def pool() -> Object:
    """Its trainer cannot hold its own imports."""
    spec: Object = {
        "model": {"builtin": "tiny"},
        "maxRank": 8,
        "rollout": {"engine": "reference", "maxModelLen": 128},
        "trainer": {"memory": "32Mi"},
    }
    return {"apiVersion": "marlaas.dev/v1alpha1", "kind": "ModelPool", "metadata": {"name": POOL}, "spec": spec}


@pytest.fixture(scope="module")
def crowded(platform: Platform) -> Iterator[None]:
    """That pool, for as long as this file needs it."""
    platform.apply(pool())
    yield
    platform.kubectl("delete", "modelpool", POOL, "--timeout=120s")


def test_a_sandbox_that_ends_by_itself_says_why_and_fails_by_its_backoff_limit(platform: Platform) -> None:
    platform.tiny_pool()
    platform.tenant(TEAM)
    (body,) = (copy.deepcopy(each) for each in manifest("own-image") if each["kind"] == "RLJob")
    body["metadata"] = {"name": "bookless", "namespace": TEAM}
    body["spec"]["environment"] = {
        "image": body["spec"]["environment"]["image"],
        "entrypoint": ["python3", "-c", f"import sys; sys.exit('{WORDS}')"],
        "memory": "128Mi",
    }
    platform.apply(body | {"spec": body["spec"] | {"backoffLimit": 2}})

    def crashing() -> bool:
        status = platform.status("rljob", "bookless", TEAM)
        return status.get("reason") == "ContainerCrashing" and WORDS in status["message"]

    platform.until(crashing, "the job says what its sandbox said last", SECONDS)
    assert WORDS in platform.why("bookless", TEAM)
    status = platform.ended("bookless", TEAM, 300)
    assert (status["phase"], status["reason"]) == ("Failed", "BackoffLimitExceeded"), status
    assert WORDS in status["message"], status


@pytest.mark.usefixtures("crowded")
def test_a_trainer_that_takes_more_memory_than_it_may_says_so(platform: Platform) -> None:
    def told() -> Object:
        found = platform.condition("modelpool", POOL, "TrainerReady")
        return found if found.get("reason") == "ContainerOutOfMemory" else {}

    message = platform.until(told, "the pool says that its trainer has too little memory", SECONDS)["message"]
    assert f"{POOL}-trainer-0" in message
    assert "exceeded its memory limit" in message
