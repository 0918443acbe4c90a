"""Deleting a job, and a whole namespace, while it runs: everything goes, nothing hangs."""

import json

from marlaas_e2e.platform import NAMESPACE, RELEASE, Platform, manifest

TEAM = "team-f"
_KEYS = """
import asyncio, json, sys
from pathlib import Path
from marlaas_api import subjects
from marlaas_api.bus_nats import connect
async def main(url, creds, prefix):
    bus = await connect(url, name="leftovers", creds=Path(creds))
    try:
        found = {}
        for name in (subjects.JOBS, subjects.PROGRESS, subjects.POLICY, subjects.LEDGER):
            bucket = await bus.bucket(name)
            found[name] = [entry.key for entry in await bucket.entries(prefix)]
    finally:
        await bus.close()
    print(json.dumps(found))
asyncio.run(main(*sys.argv[1:]))
"""


def keys(platform: Platform) -> dict[str, list[str]]:
    """What the bus still holds of the team's jobs."""
    words = [f"nats://{RELEASE}-nats.{NAMESPACE}.svc:4222", "/etc/marlaas/bus/orchestrator.creds", f"{TEAM}."]
    pod = ("exec", "-n", NAMESPACE, f"deployment/{RELEASE}-orchestrator", "-c", "orchestrator", "--")
    found: dict[str, list[str]] = json.loads(platform.kubectl(*pod, "python3", "-c", _KEYS, *words))
    return found


def start(platform: Platform) -> None:
    platform.tiny_pool()
    platform.tenant(TEAM)
    (body,) = manifest("endless")
    body["metadata"]["namespace"] = TEAM
    platform.apply(body)
    platform.until(lambda: platform.status("rljob", "endless", TEAM).get("step"), "the first step", 300)


def test_a_running_job_that_is_deleted_leaves_nothing(platform: Platform) -> None:
    start(platform)
    platform.kubectl("delete", "rljob", "endless", "-n", TEAM, "--timeout=120s")
    kinds = "deployments,networkpolicies,serviceaccounts,pods,secrets"
    ours = "app.kubernetes.io/managed-by=marlaas-operator"
    platform.until(lambda: not platform.names(kinds, TEAM, ours), "its sandbox is gone")
    assert not any(keys(platform).values())
    platform.until(lambda: platform.status("modelpool", "tiny")["slots"] == "0/16", "its slots are free")


def test_a_namespace_that_is_deleted_takes_its_job_along(platform: Platform) -> None:
    start(platform)
    platform.kubectl("delete", "namespace", TEAM, "--timeout=180s")
    # It is bound to the claim that went along: on a kept cluster a new claim of that name would wait for ever.
    platform.kubectl("delete", "persistentvolume", f"python-environment-{TEAM}", "--ignore-not-found")
    assert not any(keys(platform).values())
