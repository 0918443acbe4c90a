"""The server's accounts: SYS for NATS itself, MARLAAS for the platform and all streams, SANDBOXES for every sandbox.

Sandboxes have an account of their own because NATS does not check the reply subject of a request, and the JetStream
server answers to any subject. In one account, a sandbox could direct such an answer (an acknowledgement, an empty
status) to `$KV.policy.…` or `$JS.API.STREAM.PURGE.…`, and thereby make the server do a forbidden operation.

Between accounts, an answer only returns to the requester's account. That account contains only inboxes of other
sandboxes and the services below. The rollout role and the orchestrator receive requests with reply subjects made by NATS
(`_R_.…`), and may answer only to those.
"""

from dataclasses import dataclass
from typing import Any

from marlaas_api import subjects
from marlaas_api.bus_users.nkey import account_id

SYSTEM, PLATFORM, SANDBOXES = account_id("SYS"), account_id("MARLAAS"), account_id("SANDBOXES")
_API = "$JS.API"


@dataclass(frozen=True, slots=True)
class ServiceExport:
    """A service that the platform's account offers to the sandboxes' account.

    max_gap_s: longest time between two answers to one request, after which the server drops the reply route; None:
    there is only one answer.
    """

    name: str
    subject: str
    max_gap_s: int | None = None


# Replicas send a heartbeat every second, and a fetch of tasks waits at most a second. Acks in JetStream's longer form
# (`$JS.ACK.<domain>.<account>.…`, off by default) are not exported: with a wildcard before the stream, the subject would also match
# acks of other streams' consumers.
SERVICES = (
    ServiceExport("generation", subjects.generation("*", "*", "*"), max_gap_s=60),
    ServiceExport("episodes", subjects.episode("*", "*")),
    ServiceExport("tasks", f"{_API}.CONSUMER.MSG.NEXT.{subjects.TASKS}.*", max_gap_s=15),
    ServiceExport("acks", f"$JS.ACK.{subjects.TASKS}.>"),
    *(
        ServiceExport(bucket, f"{_API}.DIRECT.GET.KV_{bucket}.$KV.{bucket}.*.*")
        for bucket in (subjects.JOBS, subjects.PROGRESS, subjects.EXPORTS)
    ),
    ServiceExport("steps", f"{_API}.DIRECT.GET.{subjects.STEPS}.step.*.*.*"),
    ServiceExport("evaluations", f"{_API}.DIRECT.GET.{subjects.STEPS}.eval.*.*.*"),
    ServiceExport("adapters", subjects.export("*", "*")),
    ServiceExport("reports", f"$KV.{subjects.EXPORTS}.*.*"),
)


def operator_claims(public_id: str) -> dict[str, Any]:
    """Return the claims of the operator, whose signature the server trusts."""
    return _claims("marlaas", public_id, {"type": "operator", "system_account": SYSTEM})


def account_claims(account: str, signing_id: str) -> dict[str, Any]:
    """Return the claims of one of the three accounts; the signing key signs its users."""
    body: dict[str, Any] = {"type": "account", "limits": _limits(account == PLATFORM), "signing_keys": [signing_id]}
    if account == PLATFORM:
        body["exports"] = [_export(service) for service in SERVICES]
    elif account == SANDBOXES:
        body["imports"] = [_import(service) for service in SERVICES]
    return _claims({SYSTEM: "SYS", PLATFORM: "MARLAAS", SANDBOXES: "SANDBOXES"}[account], account, body)


def _claims(name: str, subject: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "sub": subject, "iat": 0, "nats": {"version": 2, **body}}


def _export(service: ServiceExport) -> dict[str, Any]:
    max_gap_s = service.max_gap_s
    answers = {} if max_gap_s is None else {"response_type": "Stream", "response_threshold": max_gap_s * 10**9}
    return {"name": service.name, "subject": service.subject, "type": "service", **answers}


def _import(service: ServiceExport) -> dict[str, Any]:
    return {"name": service.name, "subject": service.subject, "account": PLATFORM, "type": "service"}


def _limits(jetstream: bool) -> dict[str, Any]:
    """Return the limits of an account: unbounded (-1), or no JetStream at all.

    Streams are limited by their own configuration and the server's disk.
    """
    names = ("subs", "data", "payload", "imports", "exports", "conn", "leaf")
    kept = ("mem_storage", "disk_storage", "streams", "consumer") if jetstream else ()
    return {**dict.fromkeys((*names, *kept), -1), "wildcards": True, "disallow_bearer": True}
