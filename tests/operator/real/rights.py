"""Who the operator is under the chart's rights, and when these are in force: the API server learns of a new role or policy a moment after it took it."""

import asyncio
import contextlib
import subprocess
from functools import cache
from pathlib import Path

import yaml
from tests.operator.objects import SYSTEM
from tests.operator.real.harness import OperatorHarness, eventually

from marlaas_e2e import binaries
from marlaas_e2e.kubectl import CommandFailed
from marlaas_operator.cluster import Body, Forbidden, Invalid, Target
from marlaas_operator.cluster.api_server import connect

USER = f"system:serviceaccount:{SYSTEM}:marlaas-operator"
GROUPS = ["system:serviceaccounts", f"system:serviceaccounts:{SYSTEM}", "system:authenticated"]
ROOT = Path(__file__).parents[3]


@cache
def chart(values: str) -> list[Body]:
    """What the chart installs for the operator, with a set of values of the chart's own tests."""
    command: list[str | Path] = [
        binaries.ensure(["helm"])["helm"],
        *("template", "marlaas", ROOT / "charts/marlaas", "--namespace", SYSTEM),
        *("--values", ROOT / f"tests/chart/values/{values}.yaml"),
        *(f"--show-only=templates/{file}.yaml" for file in ("operator/rbac", "operator/admission", "installation")),
    ]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [body for body in yaml.safe_load_all(text) if body]


def install(harness: OperatorHarness, values: str) -> None:
    harness.plane.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(chart(values)))


async def granted(harness: OperatorHarness, secret: str) -> None:
    """Wait until the operator has both its roles. secret: with the bus's keys, the only one that its Role lets it read."""
    rights = (("list", "rljobs", "--all-namespaces"), ("get", f"secrets/{secret}", "--namespace", SYSTEM))

    async def may() -> bool:
        try:
            for right in rights:
                await asyncio.to_thread(harness.plane.kubectl, "auth", "can-i", *right, "--as", USER)
        except CommandFailed:
            return False
        return True

    await eventually(harness, "the operator's roles are in force", may)


async def in_force(harness: OperatorHarness, foreign: Target) -> None:
    """Wait until the operator is kept from somebody else's object by the admission policy, no more by having no rights at all."""
    as_operator = await connect(harness.plane.user_kubeconfig(USER, GROUPS))

    async def refused() -> bool:
        with contextlib.suppress(Forbidden):
            try:
                await as_operator.patch(foreign, {"metadata": {"annotations": {"example.com/probe": "1"}}})
            except Invalid:
                return True
        return False

    try:
        await eventually(harness, "the admission policy is in force", refused)
    finally:
        await as_operator.close()
