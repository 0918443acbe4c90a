"""Check of an installation, run by `helm test`.

Usage: `python -m marlaas_operator.installed --installation FILE --creds FILE`. It checks that the API server
serves ModelPools and Tenants, that operator and orchestrator are available, and that the bus has the bucket of jobs.
"""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from marlaas_api.bus_nats import connect as connect_bus
from marlaas_api.errors import MarlaasError
from marlaas_api.subjects import JOBS
from marlaas_operator.cluster import Body, Cluster, Target
from marlaas_operator.cluster.api_server import connect
from marlaas_operator.cluster.resources import DEPLOYMENTS, MODELPOOLS, TENANTS
from marlaas_operator.installation import Installation, load

Check = Callable[[], Awaitable[str]]
"""One check; returns a sentence. Raises MarlaasError if the check fails."""


class NotWorking(MarlaasError):
    """A component exists but is not available; the text names it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks and print one line each; return 0 if all pass, else 1."""
    parser = argparse.ArgumentParser(prog="python -m marlaas_operator.installed")
    parser.add_argument("--installation", required=True, type=Path, metavar="FILE", help="the operator's own file")
    parser.add_argument(
        "--creds", required=True, type=Path, metavar="FILE", help="the operator's credential on the bus"
    )
    parser.add_argument("--kubeconfig", type=Path, metavar="FILE", help="outside a cluster")
    options = parser.parse_args(arguments)
    return asyncio.run(_run_checks(load(options.installation), options.creds, options.kubeconfig))


async def _run_checks(installation: Installation, creds: Path, kubeconfig: Path | None) -> int:
    cluster = await connect(kubeconfig)
    try:
        checks = (
            lambda: kinds_served(cluster),
            lambda: available(cluster, installation, "operator"),
            lambda: available(cluster, installation, "orchestrator"),
            lambda: bus_answers(installation, creds),
        )
        return 0 if all([await _is_ok(check) for check in checks]) else 1
    finally:
        await cluster.close()


async def _is_ok(check: Check) -> bool:
    """Run a check and print its result."""
    try:
        sys.stdout.write(f"ok: {await check()}\n")
    except MarlaasError as error:
        sys.stdout.write(f"FAILED: {error}\n")
        return False
    return True


async def kinds_served(cluster: Cluster) -> str:
    """Check that the API server serves ModelPools and Tenants."""
    pools, tenants = await cluster.list(MODELPOOLS), await cluster.list(TENANTS)
    return f"the API server serves the kinds ModelPool ({len(pools)} objects) and Tenant ({len(tenants)} objects)"


async def available(cluster: Cluster, installation: Installation, component: str) -> str:
    """Check that a Deployment of the chart is available.

    Raises:
        NotWorking: it is not; with the message of its condition.
    """
    name = f"{installation.release}-{component}"
    deployment = await cluster.get(Target(DEPLOYMENTS, installation.namespace, name))
    condition = _condition(deployment, "Available")
    if condition.get("status") != "True":
        raise NotWorking(f"{name} is not available: {condition.get('message', 'its status has no such condition yet')}")
    return f"{name} is available"


def _condition(body: Body, name: str) -> Body:
    conditions = body.get("status", {}).get("conditions", [])
    return next((dict(each) for each in conditions if each["type"] == name), {})


async def bus_answers(installation: Installation, creds: Path) -> str:
    """Check that the bus accepts the credential and has the bucket of jobs."""
    bus = await connect_bus(installation.nats_url, name=f"{installation.release}-test", creds=creds)
    try:
        pages = (await bus.bucket(JOBS)).pages()
        jobs = {entry.key: entry.data is not None async for page in pages for entry in page}
    finally:
        await bus.close()
    return f"the bus at {installation.nats_url} answers and knows {sum(jobs.values())} jobs"


if __name__ == "__main__":
    sys.exit(main())
