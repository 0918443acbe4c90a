"""The server's accounts: SYS for NATS itself, MARLAAS for the platform and all streams, SANDBOXES for every sandbox.

Why sandboxes have an account of their own: NATS does not check where a request wants its answer, and the JetStream server answers anywhere.
In one account a sandbox could aim such an answer (an acknowledgement, an empty status) at `$KV.policy.…` or `$JS.API.STREAM.PURGE.…`
and have the server do what it may not. Between accounts an answer only comes back into the asker's account, where there is nothing but
other sandboxes' inboxes and the few services below. The rollout role hears requests with reply subjects that NATS made (`_R_.…`), and may
answer nowhere else.
"""

from dataclasses import dataclass
from typing import Any

from marlaas_api import subjects
from marlaas_api.bus_users.nkey import account_id

SYSTEM, PLATFORM, SANDBOXES = account_id("SYS"), account_id("MARLAAS"), account_id("SANDBOXES")
_API = "$JS.API"


@dataclass(frozen=True, slots=True)
class ServiceExport:
    """What the platform's account answers to the sandboxes'. lull_s: there are several answers to one request, and none comes later than
    this after the one before (the server then forgets the way back); None: there is one answer."""

    name: str
    subject: str
    max_gap_s: int | None = None


# Replicas beat every second. Who claims waits for a second at most. Acks in JetStream's longer form (`$JS.ACK.<domain>.<account>.…`, off by
# default) are left out: with a wildcard before the stream, they would read as acks of other streams' consumers.
SERVICES = (
    ServiceExport("generation", subjects.generation("*", "*", "*"), max_gap_s=60),
    ServiceExport("episodes", subjects.episode("*", "*")),
    ServiceExport("tasks", f"{_API}.CONSUMER.MSG.NEXT.{subjects.TASKS}.*", max_gap_s=15),
    ServiceExport("acks", f"$JS.ACK.{subjects.TASKS}.>"),
    ServiceExport("jobs", f"{_API}.DIRECT.GET.KV_{subjects.JOBS}.$KV.{subjects.JOBS}.*.*"),
)


def operator_claims(public_id: str) -> dict[str, Any]:
    """The server trusts what this operator signs."""
    return _claims("marlaas", public_id, {"type": "operator", "system_account": SYSTEM})


def account_claims(account: str, signing_id: str) -> dict[str, Any]:
    """One of the three accounts, whose users this key signs."""
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
    """Unbounded (-1): what bounds streams is their own configuration and the server's disk. Without `jetstream` there is none."""
    names = ("subs", "data", "payload", "imports", "exports", "conn", "leaf")
    kept = ("mem_storage", "disk_storage", "streams", "consumer") if jetstream else ()
    return {**dict.fromkeys((*names, *kept), -1), "wildcards": True, "disallow_bearer": True}
