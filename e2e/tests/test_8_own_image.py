"""A team's environment in an image of its own: it is trained on, beside a supervisor whose credential it never sees."""

import base64
import json
from collections.abc import Iterator

import pytest

from marlaas_e2e.api import Object
from marlaas_e2e.platform import NAMESPACE, RELEASE, Platform, manifest, plain_pool, tenant

TEAM, JOB = "team-i", "own-image"
LETTERS = "hgfedcba"

# Where the words of standard input are: files of the whole container, and variables and arguments of every process in sight.
_SEARCH = """
import json, os, sys
words = sys.stdin.read().encode().split()
found, num_read = {word.decode(): [] for word in words}, 0
def look(path):
    global num_read
    try:
        if os.path.isfile(path) and (path.startswith("/proc") or os.path.getsize(path) < 1 << 20):
            content = open(path, "rb").read()
            num_read += 1
            for word in words:
                if word in content:
                    found[word.decode()].append(path)
    except OSError:
        pass
for folder, folders, files in os.walk("/"):
    folders[:] = [each for each in folders if os.path.join(folder, each) not in ("/proc", "/sys")]
    for file in files:
        look(os.path.join(folder, file))
for process in filter(str.isdigit, os.listdir("/proc")):
    for file in ("environ", "cmdline"):
        look(f"/proc/{process}/{file}")
print(json.dumps([found, num_read]))
"""

_SURROUNDINGS = """
import json, os
standard = ("/proc", "/sys", "/dev", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
mounts = [line.split()[4] for line in open("/proc/self/mountinfo")]
programs = set()
for process in set(filter(str.isdigit, os.listdir("/proc"))) - {str(os.getpid())}:
    try:
        programs.add(open(f"/proc/{process}/cmdline").read().replace("\\0", " ").strip())
    except (FileNotFoundError, ProcessLookupError):
        pass  # an episode that has ended meanwhile
print(json.dumps({
    "mounts": sorted({mount for mount in mounts if not mount.startswith(standard)}),
    "shared": os.listdir("/run/marlaas"),
    "programs": sorted(programs - {""}),
    "uid": os.getuid(),
}))
"""

_ASK_THE_BUS = """
import socket, sys
with socket.create_connection((sys.argv[1], 4222), timeout=10) as bus:
    bus.sendall(b'CONNECT {"verbose":false}\\r\\nPING\\r\\n')
    heard = b""
    while b"PONG" not in heard and (more := bus.recv(4096)):
        heard += more
print(heard.decode())
"""


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
    found, num_read = json.loads(python(platform, pod, _SEARCH, stdin="\n".join([*hidden, LETTERS])))
    assert num_read > 1000
    assert "/proc/1/environ" in found.pop(LETTERS)
    assert not any(found.values()), list(found.values())
    answer = python(platform, pod, _ASK_THE_BUS, f"{RELEASE}-nats.{NAMESPACE}.svc")
    assert "Authorization Violation" in answer
    assert "PONG" not in answer


def test_the_containers_share_a_socket_and_nothing_else(platform, pod):
    surroundings = json.loads(python(platform, pod, _SURROUNDINGS))
    (program,) = surroundings.pop("programs")  # the server and what it forks; nothing of the supervisor
    assert program.endswith("marlaas env serve mirror:Mirror")
    assert surroundings == {"mounts": ["/", "/run/marlaas", "/tmp"], "shared": ["environment.sock"], "uid": 10001}
