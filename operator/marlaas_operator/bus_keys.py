"""The bus's signing keys, created once in the installation's Secret, and the platform's credentials beside them.

The keys are never overwritten: after `helm upgrade`, the server and running pods still use them. The credentials
of operator and orchestrator are renewed in place.
"""

import base64
import json
import logging

from marlaas_api.bus_users import (
    BusKeys,
    BusUser,
    KeyInvalid,
    OperatorUser,
    OrchestratorUser,
    mint,
    server_config,
)
from marlaas_api.errors import InvalidInput
from marlaas_api.nats_server import MAX_PAYLOAD_BYTES
from marlaas_operator.cluster import AlreadyExists, Body, Cluster, NotFound, Target
from marlaas_operator.cluster.resources import CONFIG_MAPS, SECRETS
from marlaas_operator.installation import Installation

log = logging.getLogger(__name__)

KEYS = "keys.json"
_SERVER = "nats.conf"
_PLATFORM: dict[str, BusUser] = {"operator.creds": OperatorUser(), "orchestrator.creds": OrchestratorUser()}
_MAX_STORE_BYTES = 4 << 40


async def ensure_keys(cluster: Cluster, installation: Installation) -> BusKeys:
    """Return the installation's keys; create them if there are none.

    Raises:
        InvalidInput: the Secret of an external bus is absent, or a Secret exists without valid keys.
    """
    target = Target(SECRETS, installation.namespace, installation.bus_secret)
    secret = await _found(cluster, target)
    if secret is None and installation.nats_pod_selector is None:
        raise InvalidInput(f"{target} does not exist; create it with the keys of the external bus under the key {KEYS}")
    if secret is None:
        try:
            secret = await cluster.create(await _fresh(cluster, installation, target))
            log.info("created the keys of the bus in %s", target)
        except AlreadyExists:
            secret = await cluster.get(target)
    return _keys_of(secret, target)


async def renew_platform(cluster: Cluster, installation: Installation, keys: BusKeys, now: float) -> None:
    """Write the platform's credentials of the present time window, and this release's server configuration, unless they are in the Secret.

    A server takes up a new configuration when it restarts.
    """
    target = Target(SECRETS, installation.namespace, installation.bus_secret)
    wanted = _platform(keys, now)
    if installation.nats_pod_selector is not None:
        wanted[_SERVER] = _encoded(_server(keys))
    data = (await cluster.get(target)).get("data") or {}
    if any(data.get(key) != value for key, value in wanted.items()):
        await cluster.patch(target, {"data": wanted})
        log.info("renewed the platform's bus credentials in %s", target)


async def _found(cluster: Cluster, target: Target) -> Body | None:
    try:
        return await cluster.get(target)
    except NotFound:
        return None


async def _fresh(cluster: Cluster, installation: Installation, target: Target) -> Body:
    """Build a Secret with new keys, owned by the installation's ConfigMap, so that both are deleted together."""
    keys = BusKeys.make()
    owner = await _found(cluster, Target(CONFIG_MAPS, installation.namespace, f"{installation.release}-installation"))
    labels = {
        "app.kubernetes.io/name": "marlaas",
        "app.kubernetes.io/component": "nats",
        "app.kubernetes.io/instance": installation.release,
        "app.kubernetes.io/managed-by": "marlaas-operator",
    }
    metadata: Body = {"name": target.name, "namespace": target.namespace, "labels": labels}
    if owner is not None:
        of = owner["metadata"]
        reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": of["name"], "uid": of["uid"]}
        metadata["ownerReferences"] = [reference]
    data = {KEYS: _encoded(json.dumps(keys.dump())), _SERVER: _encoded(_server(keys))}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": data}


def _server(keys: BusKeys) -> str:
    """Return nats-server's configuration; the chart adds the listen addresses and the store's path."""
    return (
        f"max_payload: {MAX_PAYLOAD_BYTES}\njetstream {{ max_file_store: {_MAX_STORE_BYTES} }}\n{server_config(keys)}"
    )


def _keys_of(secret: Body, target: Target) -> BusKeys:
    text = (secret.get("data") or {}).get(KEYS)
    if text is None:
        raise InvalidInput(f"{target} has no key {KEYS}; without it the operator cannot issue credentials")
    try:
        return BusKeys.load(json.loads(base64.b64decode(text)))
    except (ValueError, KeyInvalid) as error:
        raise InvalidInput(f"{target}, key {KEYS}: {error}") from error


def _platform(keys: BusKeys, now: float) -> dict[str, str]:
    return {key: _encoded(mint(keys, user, now)) for key, user in _PLATFORM.items()}


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
