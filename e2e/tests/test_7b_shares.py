"""Two tenants of weights 1 and 3 on one pool: quotas, a pool that is scaled under load, preemption, and shares that follow the weights."""

import csv
import io
import re
from collections.abc import Iterator

import pytest

from marlaas_e2e.api import Object
from marlaas_e2e.platform import NAMESPACE, Platform, endless, tenant
from marlaas_e2e.step_records import assert_exact

POOL, PLACES = "shared", 4
LIGHT, HEAVY = "light", "heavy"
TEAMS = {LIGHT: "team-q", HEAVY: "team-o"}
LIGHTS = [f"light-{number}" for number in range(4)]
HEAVIES = [f"heavy-{number}" for number in range(4)]
_TOKENS = """
import re, urllib.request
text = urllib.request.urlopen("http://127.0.0.1:8081/metrics", timeout=5).read().decode()
print(sum(float(value) for value in re.findall(r'^marlaas_rollout_tokens_total[{].*namespace="team-[qo]".*[}] (.*)$', text, re.M)))
"""


def tenant_of(name: str, weight: int, quota: Object) -> Object:
    spec = {"namespaces": [TEAMS[name]], "weight": weight, "quota": quota}
    return {"apiVersion": "marlaas.dev/v1alpha1", "kind": "Tenant", "metadata": {"name": name}, "spec": spec}


def begin(_: Platform) -> list[Object]:
    """A pool that admits four agents, and both tenants."""
    rollout = {"engine": "reference", "maxModelLen": 256, "agentsPerSlot": 1}
    spec = {"model": {"builtin": "tiny"}, "adapterSlots": PLACES, "maxRank": 8, "rollout": rollout}
    return [
        {"apiVersion": "marlaas.dev/v1alpha1", "kind": "ModelPool", "metadata": {"name": POOL}, "spec": spec},
        *(body for namespace in TEAMS.values() for body in tenant(namespace)),
        tenant_of(LIGHT, 1, {"jobs": 3}),
        tenant_of(HEAVY, 3, {"adapterSlots": 3}),
    ]


def job(name: str) -> Object:
    return endless(name, TEAMS[name.partition("-")[0]], poolRef={"name": POOL})


def statuses(platform: Platform, tenant: str) -> dict[str, Object]:
    listed = platform.cluster.get("rljobs", "-n", TEAMS[tenant])["items"]
    return {each["metadata"]["name"]: each["status"] for each in listed if "status" in each}


def go_on(platform: Platform, tenant: str) -> None:
    """Wait until each of a tenant's three running jobs has made two more steps; one may have been made before and not be told yet."""

    def running() -> dict[str, int]:
        found = statuses(platform, tenant).items()
        steps = {name: int(each.get("step") or 0) for name, each in found if each.get("phase") == "Running"}
        return steps if len(steps) == 3 else {}

    before = platform.until(running, f"three jobs of {tenant} run", 300)

    def more() -> bool:
        now = running()
        return now.keys() == before.keys() and all(now[name] > before[name] + 1 for name in before)

    platform.until(more, f"two more steps of each job of {tenant}", 300)


def scale(platform: Platform, replicas: int) -> None:
    """Change the number of engines and trainers, while the running jobs go on."""
    platform.patch("modelpool", POOL, {role: {"replicas": replicas} for role in ("rollout", "trainer")})


def until_scaled(platform: Platform, replicas: int) -> None:
    """Wait until just that many engines and trainers serve."""

    def scaled() -> bool:
        found = platform.status("modelpool", POOL)
        pods = platform.names("pods", NAMESPACE, f"marlaas.dev/pool={POOL}")
        wanted = f"{replicas}/{replicas}"
        return (found["rolloutReady"], found["trainerReady"], len(pods)) == (wanted, wanted, 2 * replicas)

    platform.until(scaled, f"{replicas} engines and trainers serve", 900)


def tokens(platform: Platform, replica: int) -> float:
    """Tokens that an engine has generated for the two tenants."""
    return float(platform.python(f"{POOL}-rollout-{replica}", "rollout", _TOKENS))


def columns(platform: Platform) -> dict[str, dict[str, str]]:
    """What `kubectl get tenants` shows, by tenant and column."""
    heading, *rows = platform.kubectl("get", "tenants").splitlines()
    starts = {match[0]: match.start() for match in re.finditer(r"\S+", heading)}
    return {row.split()[0]: {name: row[start:].partition(" ")[0] for name, start in starts.items()} for row in rows}


def assert_no_faults(platform: Platform, tenant: str) -> None:
    counts = ("faults", "trainingFaults", "sandboxCrashes")
    found = {}
    for name, each in statuses(platform, tenant).items():
        found[name] = [each[count] for count in counts if each.get(count)]
    assert not any(found.values()), found


def over_quota(platform: Platform, tenant: str) -> tuple[str, Object]:
    """Wait until a job is queued because of its tenant's quota and says which job it waits for; return its name and status.

    Just after the admission of the tenant's jobs, no step of theirs is known, and the message names none of them.
    """

    def found() -> list[tuple[str, Object]]:
        listed = statuses(platform, tenant).items()
        queued = [
            (name, each) for name, each in listed if (each.get("phase"), each.get("reason")) == ("Queued", "OverQuota")
        ]
        return [(name, each) for name, each in queued if "; waits for " in each["message"]]

    return platform.until(found, f"a job of {tenant} is over quota")[0]


def preempted(platform: Platform) -> dict[str, Object]:
    return {name: each for name, each in statuses(platform, LIGHT).items() if each.get("reason") == "Preempted"}


@pytest.fixture(scope="module", autouse=True)
def shared(platform: Platform) -> Iterator[None]:
    """The jobs of one tenant: as many as its quota allows, and one more."""
    platform.pool_ready(POOL)
    platform.apply(*(job(name) for name in LIGHTS))
    yield
    for namespace in TEAMS.values():
        platform.kubectl("delete", "rljobs", "--all", "-n", namespace, "--wait=false")
    platform.kubectl("delete", "modelpool", POOL, "--wait=false")


def test_a_job_over_quota_waits_with_the_numbers_and_runs_once_there_is_room(platform):
    last, status = over_quota(platform, LIGHT)  # created in one second, the jobs are admitted as their documents arrive
    waits_for = re.match(r"over quota: 3 of 3 jobs; waits for team-q/(light-\d), \d+ of \d+ steps", status["message"])
    assert waits_for, status
    first = waits_for[1]
    assert first != last
    scale(platform, 2)  # for the next scenario: its new pods start meanwhile
    platform.until(lambda: "3 of 3 jobs" in platform.why(last, TEAMS[LIGHT]), "`why` names the quota")
    platform.kubectl("delete", "rljob", first, "-n", TEAMS[LIGHT], "--timeout=120s")
    running = lambda: statuses(platform, LIGHT)[last]["phase"] == "Running"  # noqa: E731
    platform.until(running, f"{last} runs in the place of {first}")


def test_a_pool_is_scaled_up_and_down_under_load_without_a_fault(platform):
    scale(platform, 2)
    until_scaled(platform, 2)
    before = [tokens(platform, replica) for replica in range(2)]
    spread = lambda: all(tokens(platform, replica) > before[replica] for replica in range(2))  # noqa: E731
    platform.until(spread, "both engines generate", 300)
    scale(platform, 1)
    until_scaled(platform, 1)
    go_on(platform, LIGHT)
    assert_no_faults(platform, LIGHT)


def test_a_tenant_with_the_smaller_share_preempts_and_the_shares_follow_the_weights(platform):
    platform.apply(*(job(name) for name in HEAVIES))
    wanted = {LIGHT: ("0.25", "1", "2"), HEAVY: ("0.75", "3", "1")}

    def shown() -> dict[str, tuple[str, str, str]]:
        rows = columns(platform)
        return {name: (rows[name]["HELD"], rows[name]["JOBS"], rows[name]["QUEUED"]) for name in TEAMS}

    platform.until(lambda: shown() == wanted, "the tenants hold the pool by their weights", 180)
    entitled = {name: platform.status("tenant", name)["shareEntitled"] for name in TEAMS}
    assert entitled[HEAVY] == pytest.approx(3 * entitled[LIGHT], abs=0.03)
    last, status = over_quota(platform, HEAVY)
    text = r"over quota: 3 of 3 adapter slots, and it needs 1; waits for team-o/(heavy-\d), "
    waits_for = re.match(text, status["message"])
    assert waits_for, status
    assert waits_for[1] in {*HEAVIES} - {last}
    victims = preempted(platform)
    assert len(victims) == 2
    for name, status in victims.items():
        assert status["phase"] == "Queued", status
        assert status["message"].startswith("preempted by tenant heavy (team-o/heavy-"), status
        assert "preempted by tenant heavy" in platform.why(name, TEAMS[LIGHT])


def test_a_preempted_job_resumes_and_no_step_is_lost_or_repeated(platform):
    before = {name: status["step"] for name, status in preempted(platform).items()}
    go_on(platform, HEAVY)
    assert {name: status["step"] for name, status in preempted(platform).items()} == before
    assert_no_faults(platform, HEAVY)
    platform.kubectl("delete", "rljobs", "--all", "-n", TEAMS[HEAVY], "--timeout=120s")
    go_on(platform, LIGHT)
    left = [*statuses(platform, LIGHT)]
    for name in left:
        platform.patch("rljob", name, {"suspend": True}, TEAMS[LIGHT])
    suspended = lambda: all(each["phase"] == "Suspended" for each in statuses(platform, LIGHT).values())  # noqa: E731
    platform.until(suspended, "the jobs are suspended")
    assert_no_faults(platform, LIGHT)
    for name in left:
        assert_exact(platform, TEAMS[LIGHT], name)


def test_the_usage_of_the_last_hour_is_counted_by_tenant(platform):
    rows = csv.DictReader(io.StringIO(platform.marlaas("usage", "--since", "1h", "--csv")))
    used = {row["tenant"]: int(row["trained_tokens"]) for row in rows}
    for name in TEAMS:
        assert 0 < used[name] <= platform.status("tenant", name)["usage"]["trainedTokens"]
