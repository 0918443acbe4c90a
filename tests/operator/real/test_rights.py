"""The operator with the rights that the chart gives it, and no others: no wildcard, and everything works."""

import asyncio
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.operator.real.harness import SYSTEM, OperatorHarness, eventually, job, pool
from tests.operator.real.orchestrators import ADMITTED, ScriptedOrchestrator
from tests.operator.real.rights import GROUPS, USER, granted, in_force

from marlaas_e2e import binaries
from marlaas_operator.cluster import Body, Forbidden, Invalid, Target
from marlaas_operator.cluster.api_server import connect
from marlaas_operator.cluster.resources import RLJOBS, SECRETS

CHART = Path(__file__).parents[3] / "charts" / "marlaas"
SHOWN = ("templates/operator/rbac.yaml", "templates/operator/admission.yaml")


@pytest.fixture(scope="session")
def chart_objects() -> list[Body]:
    """What the chart installs for the operator's rights."""
    helm = binaries.ensure(["helm"])["helm"]
    command: list[str | Path] = [
        helm,
        "template",
        "marlaas",
        CHART,
        "--namespace",
        SYSTEM,
        *(f"--show-only={file}" for file in SHOWN),
    ]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [body for body in yaml.safe_load_all(text) if body]


def test_no_rule_has_a_wildcard_and_secrets_are_only_written_but_for_the_bus_keys(chart_objects: list[Body]) -> None:
    rules = [rule for body in chart_objects if body["kind"] in ("ClusterRole", "Role") for rule in body["rules"]]
    assert rules
    for rule in rules:
        assert "*" not in (*rule["apiGroups"], *rule["resources"], *rule["verbs"])
        if "secrets" in rule["resources"]:
            reads = {"get", "list", "watch"} & set(rule["verbs"])
            assert not reads or rule.get("resourceNames") == ["marlaas-bus"]
        assert not {"impersonate", "escalate", "bind"} & set(rule["verbs"])


async def test_a_job_lives_and_goes_with_the_charts_rights_alone(
    harness: OperatorHarness, orchestrator: ScriptedOrchestrator, chart_objects: list[Body]
) -> None:
    install(harness, chart_objects)
    await harness.gateway.create(pool("tiny"))
    await granted(harness, harness.installation.bus_secret)
    operator = harness.start_operator(kubeconfig=harness.plane.user_kubeconfig(USER, GROUPS))
    await harness.gateway.create(job("team-a", "one", "tiny"))
    await harness.phase("team-a", "one", "Queued")
    await orchestrator.say("team-a", "one", **ADMITTED)
    await harness.phase("team-a", "one", "Running")
    assert len(await harness.owned("team-a")) == 4

    async def workers() -> bool:
        return len(await harness.owned(SYSTEM)) == 12

    await eventually(harness, "the pool has all its objects", workers)
    await harness.gateway.delete(Target(RLJOBS, "team-a", "one"))
    await harness.gone(Target(RLJOBS, "team-a", "one"))
    assert "forbidden" not in operator.log.read_text()
    assert harness.metric("marlaas_operator_api_requests_total", status="403") == 0
    assert harness.metric("marlaas_operator_api_requests_total", verb="POST", resource="events", status="201") >= 1


async def test_it_cannot_read_a_tenants_secret_nor_touch_what_is_not_its_own(
    harness: OperatorHarness, chart_objects: list[Body]
) -> None:
    install(harness, chart_objects)
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "theirs", "namespace": "team-a"}}
    await harness.gateway.apply(secret)
    await in_force(harness, Target(SECRETS, "team-a", "theirs"))
    as_operator = await connect(harness.plane.user_kubeconfig(USER, GROUPS))
    try:
        for refused in (
            as_operator.get(Target(SECRETS, "team-a", "theirs")),
            as_operator.list(SECRETS, namespace="team-a"),
            as_operator.delete(Target(SECRETS, "team-a", "theirs")),
        ):
            with pytest.raises((Forbidden, Invalid), match="forbidden"):
                await refused
    finally:
        await as_operator.close()


async def test_without_rights_it_says_which_one_is_missing_and_ends(harness: OperatorHarness) -> None:
    operator = harness.start_operator(kubeconfig=harness.plane.user_kubeconfig("nobody-in-particular", []))
    assert await asyncio.to_thread(operator.wait, 60) == 2
    assert "is forbidden" in operator.last_words()


def install(harness: OperatorHarness, objects: list[Body]) -> None:
    harness.plane.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(objects))
