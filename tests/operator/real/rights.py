"""Who the operator is under the chart's rights, and when these are in force: the API server learns of a new role or policy a moment after it took it."""

import asyncio
import contextlib

from tests.operator.real.harness import SYSTEM, OperatorHarness, eventually

from marlaas_e2e.kubectl import CommandFailed
from marlaas_operator.cluster import Forbidden, Invalid, Target
from marlaas_operator.cluster.api_server import connect

USER = f"system:serviceaccount:{SYSTEM}:marlaas-operator"
GROUPS = ["system:serviceaccounts", f"system:serviceaccounts:{SYSTEM}", "system:authenticated"]


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
