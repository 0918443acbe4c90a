"""Objects that break a rule of their kind, because they were stored before there was that rule: told in the status, and served once corrected."""

from typing import Any

import pytest
from tests.operator import objects
from tests.operator.objects import job, pool, tenant
from tests.operator.shell.harness import ServiceHarness, playing
from tests.tables import rows

from marlaas_operator.cluster import Body, Target, target_of
from marlaas_operator.cluster.resources import TENANTS

TENANT = Target(TENANTS, "", "a")
HANDED_OVER = "WaitingForPool"
NAMELESS = job("team-a", "nameless", "tiny")
STRANGE = [
    *(NAMELESS | {"spec": spec} for spec in ({}, {"poolRef": {}}, {"poolRef": "tiny"})),
    *(tenant("a") | {"spec": spec} for spec in ({}, {"namespaces": "team-a"})),
]


async def stored(harness: ServiceHarness, *bodies: Body) -> None:
    harness.cluster.checks_rules = False
    for body in bodies:
        await harness.cluster.create(body)
    harness.cluster.checks_rules = True


def said(harness: ServiceHarness, target: Target, condition: str) -> tuple[str, str]:
    conditions = {each["type"]: each for each in harness.status(target).get("conditions") or ()}
    found = conditions.get(condition, {})
    return found.get("reason", ""), found.get("message", "")


async def correct(harness: ServiceHarness, target: Target, **spec: Any) -> None:
    await harness.cluster.patch(target, {"spec": spec})


@pytest.mark.parametrize(("made", "condition", "wrong", "right", "then"), rows(__file__, "broken_rules"))
async def test_an_object_says_what_breaks_which_rule_and_is_served_once_corrected(made, condition, wrong, right, then):
    kind, names, spec = made
    body = getattr(objects, kind)(*names, **spec)
    harness, target = ServiceHarness(), target_of(body)
    await stored(harness, *([pool("tiny")] if kind == "job" else []), body)
    async with playing(harness):
        told = ("InvalidSpec", f"spec.{wrong}, found 0")
        await harness.until(lambda: said(harness, target, condition) == told, "told")
        await correct(harness, target, **right)
        await harness.until(lambda: said(harness, target, condition)[0] == then, "corrected")


@pytest.mark.parametrize("strange", STRANGE)
async def test_an_object_without_what_it_must_name_says_so_and_keeps_no_job_waiting(strange):
    harness = ServiceHarness()
    await stored(harness, pool("tiny"), strange, job("team-a", "one", "tiny"))
    async with playing(harness):
        await harness.until(lambda: harness.status().get("reason") == HANDED_OVER, "the other job is handed over")
        condition = "Active" if strange["kind"] == "Tenant" else "Admitted"
        await harness.until(lambda: said(harness, target_of(strange), condition)[0] == "InvalidSpec", "told")


async def test_a_new_job_waits_while_its_tenant_cannot_be_read_for_without_it_no_quota_would_apply():
    harness = ServiceHarness()
    younger = [tenant("b", "team-a", weight=0), tenant("c", "team-b", weight=0)]
    await stored(harness, pool("tiny"), tenant("a", "team-a", weight=0), *younger, job("team-a", "one", "tiny"))
    async with playing(harness) as orchestrator:
        await harness.until(lambda: harness.status().get("reason") == "InvalidSpec", "told")
        assert (harness.status()["phase"], harness.status()["tenant"]) == ("Queued", "a")
        assert harness.status()["message"].startswith("Tenant 'a' of this namespace cannot be read")
        assert orchestrator.documents == {}
        await correct(harness, TENANT, weight=2)
        await harness.until(lambda: harness.status().get("reason") == HANDED_OVER, "handed over")
        assert orchestrator.documents["team-a.one"].tenant_weight == 2
