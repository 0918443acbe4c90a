"""A team's environment in an image of its own: it is trained on, beside a supervisor whose credential it never sees."""

import base64
import json
from collections.abc import Iterator

import pytest
from tests.tables import data

from marlaas_e2e.api import Object
from marlaas_e2e.platform import NAMESPACE, RELEASE, Platform, manifest, plain_pool, tenant

TEAM, JOB = "team-i", "own-image"
LETTERS = "hgfedcba"


def begin(_: Platform) -> list[Object]:
    return [*plain_pool(), *tenant(TEAM), *manifest("own-image")]


@pytest.fixture(scope="module")
def pod(platform: Platform) -> Iterator[Object]:
    """The sandbox of the job, which has made a step."""
    platform.until(lambda: platform.step(JOB, TEAM), "the first step", 600)
    yield platform.ready_pod(TEAM, f"marlaas.dev/job={JOB}")
    platform.kubectl("delete", "rljob", JOB, "-n", TEAM, "--wait=false")


def python(platform: Platform, pod: Object, program: str, *words: str, stdin: str = "") -> str:
    """What a program prints in the environment's container."""
    return platform.python(pod["metadata"]["name"], "environment", program, *words, namespace=TEAM, stdin=stdin)


def credential(platform: Platform) -> list[str]:
    """The token and the seed that the supervisor of the job has."""
    data = platform.get("secret", f"{JOB}-sandbox", TEAM)["data"]
    lines = base64.b64decode(data["bus.creds"]).decode().split()
    return [line for line in lines if len(line) > 40]


def test_a_job_is_trained_in_the_teams_own_image(platform, pod):
    assert {container["name"] for container in pod["spec"]["containers"]} == {"supervisor", "environment"}
    trained = lambda: platform.status("rljob", JOB, TEAM)["agents"][0].get("policyVersion")  # noqa: E731
    platform.until(trained, "a version of the policy")


def test_the_credential_is_nowhere_in_the_environments_container_but_the_teams_secret_is(platform, pod):
    hidden = credential(platform)
    assert len(hidden) == 2
    found, num_read = json.loads(python(platform, pod, data(__file__, "search"), stdin="\n".join([*hidden, LETTERS])))
    assert num_read > 1000
    assert "/proc/1/environ" in found.pop(LETTERS)
    assert not any(found.values()), list(found.values())
    answer = python(platform, pod, data(__file__, "ask_the_bus"), f"{RELEASE}-nats.{NAMESPACE}.svc")
    assert "Authorization Violation" in answer
    assert "PONG" not in answer


def test_the_containers_share_a_socket_and_nothing_else(platform, pod):
    surroundings = json.loads(python(platform, pod, data(__file__, "surroundings")))
    (program,) = surroundings.pop("programs")  # the server and what it forks; nothing of the supervisor
    assert program.endswith("marlaas env serve mirror:Mirror")
    assert surroundings.pop("mounts") == ["/", "/data/rows", "/run/marlaas", "/tmp"]
    assert surroundings == {"rows": "{}", "shared": ["environment.sock"], "uid": 10001}
