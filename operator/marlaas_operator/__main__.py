"""`python -m marlaas_operator --installation FILE`: the operator as a process, from its arguments to its exit code.

Exit codes: 0 drained, 1 crashed (the log ends with the traceback; start it again), 2 only a person can help (`InvalidInput`).
"""

import argparse
import asyncio
import contextlib
import faulthandler
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from marlaas_api.background import stop_on_signals
from marlaas_api.bus import Bus
from marlaas_api.bus_nats import connect as connect_bus
from marlaas_api.bus_users import BusKeys, CredentialIssuer, OperatorUser
from marlaas_api.errors import InvalidInput, MarlaasError, Retryable, first_cause
from marlaas_api.health import HealthEndpoints, serve_health
from marlaas_operator.bus_keys import ensure_keys, renew_platform
from marlaas_operator.cluster import Cluster, Forbidden, Invalid
from marlaas_operator.cluster.api_server import ApiServer, connect
from marlaas_operator.cluster.resources import MANAGED
from marlaas_operator.handlers import WATCH_S, Watches
from marlaas_operator.installation import Installation, load
from marlaas_operator.service import ExternalSystems, Service

log = logging.getLogger("marlaas_operator")

_RENEW_EVERY_S = 600.0
_RETRY_S = 2.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the operator until SIGTERM or SIGINT; return the exit code."""
    options = _parser().parse_args(arguments)
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.Formatter.converter = time.gmtime
    try:
        installation = load(options.installation)
        logging.getLogger().setLevel(installation.log_level)
        asyncio.run(_serve(options, installation))
        log.info("the operator has drained")
        return 0
    except Exception as error:
        cause = first_cause(error)
        if isinstance(cause, InvalidInput):
            log.critical("%s", cause)
            return 2
        log.critical("%s", cause, exc_info=error)
        return 1


async def _serve(options: argparse.Namespace, installation: Installation) -> None:
    gateway = await connect(options.kubeconfig, options.kubeconfig_context)
    with tempfile.TemporaryDirectory(prefix="marlaas-operator-") as folder:
        try:
            keys = await _keys(gateway, installation)
            creds = Path(folder) / "bus.creds"
            stop = asyncio.Event()
            watches = Watches(gateway, stop, options.watch_seconds)
            service = _service(watches, gateway, installation, (keys, creds))
            gateway.observe = service.metrics.requested
            async with _health(options, service), _renewing(gateway, installation, keys, creds), stop_on_signals(stop):
                await service.run(stop)
        finally:
            await gateway.close()


def _service(
    watches: Watches,
    gateway: ApiServer,
    installation: Installation,
    bus_user: tuple[BusKeys | None, Path],
) -> Service:
    keys, creds = bus_user

    async def open_bus() -> Bus:
        return await connect_bus(
            installation.nats_url, name="operator", creds=creds if keys is not None else None, connect_timeout_s=5.0
        )

    instance = os.environ.get("POD_NAME") or socket.gethostname()
    external = ExternalSystems(gateway, open_bus, watches.run, CredentialIssuer(keys, time.time), instance)
    return Service(external, installation)


async def _keys(gateway: ApiServer, installation: Installation) -> BusKeys | None:
    """Return the bus's keys; retry until the API server answers.

    Raises:
        InvalidInput: the API server refuses access to the Secret.
    """
    while True:
        try:
            keys = await ensure_keys(gateway, installation)
            await renew_platform(gateway, installation, keys, time.time())
            return keys
        except (Forbidden, Invalid) as error:  # Invalid: refused by an admission policy
            raise InvalidInput(f"{error}; the chart's Role allows it for a Secret with the label {MANAGED}") from error
        except Retryable as error:
            log.warning("bus keys are not available: %s (retry in %.0f s)", error, _RETRY_S)
            await asyncio.sleep(_RETRY_S)


@contextlib.asynccontextmanager
async def _health(options: argparse.Namespace, service: Service) -> AsyncIterator[None]:
    if options.health is None:
        yield
        return
    endpoints = HealthEndpoints(alive=lambda: "", ready=service.missing, families=service.metric_families)
    async with serve_health(endpoints, options.health) as port:
        log.info("health and metrics on port %d", port)
        yield


@contextlib.asynccontextmanager
async def _renewing(
    gateway: Cluster, installation: Installation, keys: BusKeys | None, creds: Path
) -> AsyncIterator[None]:
    """Renew bus credentials while the context is open.

    The platform's are renewed in their Secret, the operator's own in the file `creds`.

    Raises:
        ExceptionGroup: the operator's own credential could not be written to its file.
    """
    if keys is None:
        yield
        return
    own = CredentialIssuer(keys, time.time)
    _write(creds, own.of(OperatorUser()) or "")

    async def renew() -> None:
        while True:
            await asyncio.sleep(_RENEW_EVERY_S)
            _write(creds, own.of(OperatorUser()) or "")
            try:
                await renew_platform(gateway, installation, keys, time.time())
            except MarlaasError as error:
                log.warning(
                    "renewal of the platform's bus credentials failed: %s (retry in %.0f s)", error, _RENEW_EVERY_S
                )

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(renew(), name="renew credentials")
        yield
        task.cancel()


def _write(creds: Path, text: str) -> None:
    fresh = creds.with_suffix(".new")
    fresh.touch(mode=0o600)
    fresh.write_text(text)
    fresh.replace(creds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m marlaas_operator", description=__doc__)
    parser.add_argument(
        "--installation", required=True, type=Path, metavar="FILE", help="settings that the chart wrote"
    )
    parser.add_argument("--health", type=int, metavar="PORT", help="serve /livez, /readyz and /metrics there")
    parser.add_argument(
        "--kubeconfig",
        type=Path,
        metavar="FILE",
        help="outside a cluster: file with the API server's address and credentials",
    )
    parser.add_argument("--kubeconfig-context", metavar="NAME", help="context of the kubeconfig")
    parser.add_argument(
        "--watch-seconds",
        type=float,
        default=WATCH_S,
        help="duration of a watch; a dead connection is noticed at its end",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
