"""The bus's signing keys, created once in the installation's Secret, and the credentials that they sign.

The keys are never overwritten: after `helm upgrade`, the server and running pods still use them. The platform's
own credentials in the Secret are renewed in place.
"""

import base64
import json
import logging
from collections.abc import Mapping
from typing import Protocol

from marlaas_api.bus_users import (
    BusKeys,
    BusUser,
    KeyInvalid,
    OperatorUser,
    OrchestratorUser,
    RolloutUser,
    SandboxUser,
    TrainerUser,
    mint,
    renew_at,
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


class Clock(Protocol):
    """Returns unix seconds."""

    def __call__(self) -> float: ...


class CredentialIssuer:
    """Issues credentials for jobs and pools, one per user and time window.

    keys None: the bus has no users, so there are no credentials.
    """

    def __init__(self, keys: BusKeys | None, now: Clock) -> None:
        self._keys = keys
        self._now = now
        self._kept: dict[BusUser, tuple[float, str]] = {}

    def of(self, user: BusUser) -> str | None:
        """Return the text of a user's credential; None without keys."""
        if self._keys is None:
            return None
        until, text = self._kept.get(user, (0.0, ""))
        now = self._now()
        if now >= until:
            until, text = self._kept[user] = renew_at(user, now), mint(self._keys, user, now)
        return text

    def sandbox(self, namespace: str, job: str, uid: str) -> str | None:
        """Return the credential of a job's sandbox."""
        return self.of(SandboxUser(namespace, job, uid))

    def forget_sandbox(self, namespace: str, job: str, uid: str) -> None:
        """Drop the credential of a deleted job."""
        self._kept.pop(SandboxUser(namespace, job, uid), None)

    def forget_pool(self, name: str) -> None:
        """Drop the credentials of a deleted pool."""
        for user in (RolloutUser(name), TrainerUser(name)):
            self._kept.pop(user, None)

    def pool(self, name: str) -> Mapping[str, str]:
        """Return the credentials of a pool's workers, by role; empty without keys."""
        texts = {"rollout": self.of(RolloutUser(name)), "trainer": self.of(TrainerUser(name))}
        return {role: text for role, text in texts.items() if text is not None}


async def ensure_keys(cluster: Cluster, installation: Installation) -> BusKeys:
    """Return the installation's keys; create them if there are none.

    Raises:
        InvalidInput: the Secret of an external bus is absent, or a Secret exists without valid keys.
    """
    target = Target(SECRETS, installation.namespace, installation.bus_secret)
    secret = await _found(cluster, target)
    if secret is None and installation.nats_pod_selector is None:
        raise InvalidInput(f"{target} is absent: an external bus's keys are yours to put there, under the key {KEYS}")
    if secret is None:
        try:
            secret = await cluster.create(await _fresh(cluster, installation, target))
            log.info("made the bus's keys: %s", target)
        except AlreadyExists:
            secret = await cluster.get(target)
    return _keys_of(secret, target)


async def renew_platform(cluster: Cluster, installation: Installation, keys: BusKeys, now: float) -> None:
    """Write the platform's credentials of the present time window, unless they are in the Secret."""
    target = Target(SECRETS, installation.namespace, installation.bus_secret)
    wanted = _platform(keys, now)
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
        raise InvalidInput(f"{target} has no key {KEYS}: without it no credential can be made for a sandbox")
    try:
        return BusKeys.load(json.loads(base64.b64decode(text)))
    except (ValueError, KeyInvalid) as error:
        raise InvalidInput(f"{target}, key {KEYS}: {error}") from error


def _platform(keys: BusKeys, now: float) -> dict[str, str]:
    return {key: _encoded(mint(keys, user, now)) for key, user in _PLATFORM.items()}


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
