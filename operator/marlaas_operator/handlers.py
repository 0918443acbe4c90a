"""kopf, as the watcher: every event of our kinds and of what we own becomes something seen. The only module that imports kopf.

kopf writes nothing: no finalizers, annotations, events or peering of its own. A watch ends after `watch_s` and goes on from where it was, so that
one that has silently died is noticed. After an outage kopf lists anew without saying what went meanwhile; `listed` is told of every such object.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import kopf

from marlaas_operator.cluster import Body, Resource, target_of
from marlaas_operator.cluster.api_server import ApiServer, Login
from marlaas_operator.cluster.resources import KINDS, OWNED
from marlaas_operator.resync import MANAGED
from marlaas_operator.watched import Watched

WATCH_S = 45.0
_GRACE_S = 5.0

Listed = Callable[[Resource, str], None]


@dataclass(frozen=True, slots=True)
class Flags:
    """stop: ends the watching. ready: set once kopf has put up its own signal handlers, which may then be replaced."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    ready: asyncio.Event = field(default_factory=asyncio.Event)


async def watch(
    watched: Watched,
    listed: Listed,
    gateway: ApiServer,
    flags: Flags,
    watch_s: float = WATCH_S,
) -> None:
    """Watch until `flags.stop`. listed: told kind and uid of every object that came by a list instead of a change."""
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("kopf.objects").setLevel(logging.ERROR)
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(_login(gateway))
    for resource in (*KINDS, *OWNED):
        _register(registry, resource, watched, listed)
    await kopf.operator(
        registry=registry,
        settings=_settings(watch_s),
        standalone=True,
        clusterwide=True,
        stop_flag=flags.stop,
        ready_flag=flags.ready,
    )


def _register(registry: kopf.OperatorRegistry, resource: Resource, watched: Watched, listed: Listed) -> None:
    async def seen(event: Any, **_: Any) -> None:
        body: Body = {**event["object"], "apiVersion": resource.api_version, "kind": resource.kind}
        if event["type"] == "DELETED":
            watched.lose(target_of(body), body["metadata"]["uid"])
            return
        if event["type"] is None:
            listed(resource, str(body["metadata"]["uid"]))
        watched.see(body)

    where = (resource.group, resource.version, resource.plural)
    kopf.on.event(*where, registry=registry, id=f"seen-{resource.plural}")(seen)


def _settings(watch_s: float) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.peering.standalone = True
    settings.watching.server_timeout = int(watch_s)
    settings.watching.client_timeout = watch_s + _GRACE_S
    settings.watching.inactivity_timeout = watch_s + _GRACE_S
    settings.watching.chunk_size = 500
    settings.networking.request_timeout = 20.0
    settings.networking.connect_timeout = 5.0
    for resource in OWNED:
        key = (resource.group, resource.version, resource.plural)
        settings.watching.label_selectors[key] = MANAGED
    return settings


def _login(gateway: ApiServer) -> Callable[..., Any]:
    async def login(**_: Any) -> kopf.ConnectionInfo:
        found: Login = await gateway.login()
        return kopf.ConnectionInfo(
            server=found.server,
            ca_path=found.ca_path,
            insecure=not found.verify,
            certificate_path=found.certificate_path,
            private_key_path=found.key_path,
            scheme="Bearer" if found.token else None,
            token=found.token,
        )

    return login
