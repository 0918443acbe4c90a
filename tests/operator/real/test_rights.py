"""The operator with the rights that the chart gives it, and no others: no wildcard, and everything works."""

import asyncio
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.operator.real.orchestrators import ADMITTED, ScriptedOrchestrator
from tests.operator.real.rig import SYSTEM, Rig, eventually, job, pool
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
    rig: Rig, orchestrator: ScriptedOrchestrator, chart_objects: list[Body]
) -> None:
    install(rig, chart_objects)
    await rig.gateway.create(pool("tiny"))
    await granted(rig, rig.installation.bus_secret)
    operator = rig.start_operator(kubeconfig=rig.plane.user_kubeconfig(USER, GROUPS))
    await rig.gateway.create(job("team-a", "one", "tiny"))
    await rig.phase("team-a", "one", "Queued")
    await orchestrator.say("team-a", "one", **ADMITTED)
    await rig.phase("team-a", "one", "Running")
    assert len(await rig.owned("team-a")) == 4

    async def workers() -> bool:
        return len(await rig.owned(SYSTEM)) == 12

    await eventually(rig, "the pool has all its objects", workers)
    await rig.gateway.delete(Target(RLJOBS, "team-a", "one"))
    await rig.gone(Target(RLJOBS, "team-a", "one"))
    assert "forbidden" not in operator.log.read_text()
    assert rig.metric("marlaas_operator_api_requests_total", status="403") == 0
    assert rig.metric("marlaas_operator_api_requests_total", verb="POST", resource="events", status="201") >= 1


async def test_it_cannot_read_a_tenants_secret_nor_touch_what_is_not_its_own(
    rig: Rig, chart_objects: list[Body]
) -> None:
    install(rig, chart_objects)
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "theirs", "namespace": "team-a"}}
    await rig.gateway.apply(secret)
    await in_force(rig, Target(SECRETS, "team-a", "theirs"))
    as_operator = await connect(rig.plane.user_kubeconfig(USER, GROUPS))
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


async def test_without_rights_it_says_which_one_is_missing_and_ends(rig: Rig) -> None:
    operator = rig.start_operator(kubeconfig=rig.plane.user_kubeconfig("nobody-in-particular", []))
    assert await asyncio.to_thread(operator.wait, 60) == 2
    assert "is forbidden" in operator.last_words()


def install(rig: Rig, objects: list[Body]) -> None:
    rig.plane.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(objects))
