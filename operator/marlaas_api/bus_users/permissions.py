"""Publish and subscribe permissions of the bus users: the minimum that each user's code needs. Pure.

NATS checks the subject of a request, never its body or its reply subject. Therefore a sandbox gets no subject whose
body selects the object (CONSUMER.CREATE, MSG.GET, batch reads, STREAM.INFO with a filter), and sandboxes have an
account of their own (see `accounts`). `docs/reference/bus.md` has the table with reasons.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from marlaas_api import subjects
from marlaas_api.bus_users.users import (
    BusUser,
    ExporterUser,
    OperatorUser,
    OrchestratorUser,
    RolloutUser,
    RunnerUser,
    SandboxUser,
    TrainerUser,
    inbox_prefix,
)
from marlaas_api.errors import InvalidInput
from marlaas_api.names import DNS_LABEL

API = "$JS.API"
_OF_OTHERS = frozenset({subjects.CALIBRATIONS, subjects.EXPORTS})
"""Buckets that the orchestrator neither writes nor reads."""
REPLIES = "_R_.>"
"""Reply subjects that NATS makes for answers into another account; a client cannot choose such a reply subject."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects that a user may publish and subscribe to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def permissions(user: BusUser) -> Permissions:
    """Return the permissions of a user.

    Raises InvalidInput if one of its names is not a DNS label: a wildcard would grant access to all objects.
    """
    inbox = f"{inbox_prefix(user)}.>"
    match user:
        case SandboxUser(namespace, job):
            return Permissions(_sandbox(_label(namespace), _label(job)), (inbox,))
        case ExporterUser(namespace, job):
            return Permissions(_exporter(_label(namespace), _label(job)), (inbox,))
        case RolloutUser(pool):
            return Permissions(_rollout(_label(pool)), (inbox, "gen.*.*.*", f"engine.{pool}.*"))
        case TrainerUser(pool):
            return Permissions(_trainer(_label(pool)), (inbox,))
        case OrchestratorUser():
            return Permissions(_orchestrator(), (inbox, subjects.export("*", "*")))
        case OperatorUser():
            return Permissions(_operator(), (inbox,))
        case RunnerUser():
            return Permissions(_runner(), (inbox,))


def _sandbox(namespace: str, job: str) -> tuple[str, ...]:
    consumer = subjects.consumer(namespace, job, "sandbox")
    return (
        subjects.generation(namespace, job, "*"),
        subjects.episode(namespace, job),
        f"{API}.CONSUMER.MSG.NEXT.{subjects.TASKS}.{consumer}",
        f"$JS.ACK.{subjects.TASKS}.{consumer}.>",
        _reads_keys(subjects.JOBS, subjects.job_key(namespace, job)),
    )


def _exporter(namespace: str, job: str) -> tuple[str, ...]:
    key = subjects.job_key(namespace, job)
    records = (f"step.{namespace}.{job}.*", f"eval.{namespace}.{job}.*")
    return (
        *(f"{API}.DIRECT.GET.{subjects.STEPS}.{record}" for record in records),
        *(_reads_keys(bucket, key) for bucket in (subjects.JOBS, subjects.PROGRESS, subjects.EXPORTS)),
        f"$KV.{subjects.EXPORTS}.{key}",
        subjects.export(namespace, job),
    )


def _rollout(pool: str) -> tuple[str, ...]:
    return (
        REPLIES,
        f"engine.{pool}.*",
        "turn.*.*.*.*",
        "event.*.*.rollout",
        *_writes(subjects.PINS),
        f"$KV.{subjects.REPLICAS}.{subjects.replica_key('rollout', pool, '*')}",
        _reads_keys(subjects.CALIBRATIONS, subjects.calibration_key(pool, "*")),
        *_reads(subjects.TURNS),
        *_watches(subjects.JOBS, subjects.PROGRESS, subjects.POLICY, subjects.REPLICAS, subjects.PINS),
        f"{API}.STREAM.NAMES",
    )


def _trainer(pool: str) -> tuple[str, ...]:
    return (
        "event.*.*.trainer",
        *_writes(subjects.POLICY),
        f"$KV.{subjects.REPLICAS}.{subjects.replica_key('trainer', pool, '*')}",
        f"$KV.{subjects.CALIBRATIONS}.{subjects.calibration_key(pool, '*')}",
        *_reads(subjects.GROUPS, subjects.TURNS),
        *_consumes(subjects.GROUPS),
        *_watches(subjects.JOBS, subjects.PROGRESS, subjects.POLICY, subjects.REPLICAS),
        f"{API}.STREAM.NAMES",
    )


def _orchestrator() -> tuple[str, ...]:
    logs = (subjects.TASKS, subjects.TURNS, subjects.EPISODES, subjects.GROUPS, subjects.STEPS, subjects.EVENTS)
    buckets = tuple(bucket.name for bucket in subjects.BUCKETS if bucket.name not in _OF_OTHERS)
    return (
        REPLIES,
        "task.*.*",
        "group.*.*",
        "step.*.*.*",
        "eval.*.*.*",
        "event.*.*.orchestrator",
        *_writes(*buckets),
        *_reads(*logs),
        *(f"{API}.STREAM.PURGE.{stream}" for stream in logs),
        *_consumes(subjects.EPISODES, subjects.TASKS, subjects.GROUPS),
        *_watches(*buckets),
        *_ensures(),
    )


def _operator() -> tuple[str, ...]:
    return (
        *_writes(subjects.JOBS),
        *_reads(subjects.EVENTS, subjects.STEPS),
        *_watches(
            subjects.JOBS, subjects.PROGRESS, subjects.POLICY, subjects.REPLICAS, subjects.TENANTS, subjects.EXPORTS
        ),
        *_ensures(),
    )


def _runner() -> tuple[str, ...]:
    return (
        *_writes(subjects.JOBS),
        *_reads(subjects.EPISODES, subjects.TURNS, subjects.STEPS, subjects.EVENTS),
        *_consumes(subjects.EPISODES),
        *_watches(subjects.JOBS, subjects.PROGRESS, subjects.POLICY, subjects.REPLICAS),
        *_ensures(),
    )


def _writes(*buckets: str) -> Iterable[str]:
    return (f"$KV.{bucket}.>" for bucket in buckets)


def _reads(*streams: str) -> tuple[str, ...]:
    calls = ("STREAM.INFO.{}", "DIRECT.GET.{}", "DIRECT.GET.{}.>")
    return tuple(f"{API}.{call.format(stream)}" for stream in streams for call in calls)


def _reads_keys(bucket: str, key: str) -> str:
    """Return the subject for reads of single keys, and no others of the bucket; the server refuses a body in this call."""
    return f"{API}.DIRECT.GET.KV_{bucket}.$KV.{bucket}.{key}"


def _consumes(*streams: str) -> tuple[str, ...]:
    calls = ("CREATE.{}.>", "INFO.{}.*", "DELETE.{}.*", "MSG.NEXT.{}.*")
    asked = tuple(f"{API}.CONSUMER.{call.format(stream)}" for stream in streams for call in calls)
    return (*asked, *(ack for stream in streams for ack in _acks(stream, "*")))


def _watches(*buckets: str) -> tuple[str, ...]:
    """Return the subjects for reading and following keys: an ephemeral consumer without acks, and reads at the leader."""
    calls = ("CONSUMER.CREATE.{}.>", "CONSUMER.DELETE.{}.*", "CONSUMER.MSG.NEXT.{}.*", "STREAM.MSG.GET.{}")
    streams = tuple(f"KV_{bucket}" for bucket in buckets)
    follows = tuple(f"{API}.{call.format(stream)}" for stream in streams for call in calls)
    return (*_reads(*streams), *follows)


def _ensures() -> tuple[str, ...]:
    streams = (*(spec.name for spec in subjects.STREAMS), *(f"KV_{spec.name}" for spec in subjects.BUCKETS))
    verbs = ("INFO", "CREATE", "UPDATE")
    return (*(f"{API}.STREAM.{verb}.{stream}" for stream in streams for verb in verbs), f"{API}.STREAM.NAMES")


def _acks(stream: str, consumer: str) -> tuple[str, ...]:
    """Return both forms of JetStream's ack subjects: newer servers put domain and account before the stream."""
    return f"$JS.ACK.{stream}.{consumer}.>", f"$JS.ACK.*.*.{stream}.{consumer}.>"


def _label(name: str) -> str:
    if not re.fullmatch(DNS_LABEL, name):
        raise InvalidInput(f"cannot create a bus user for {name!r}: the name is not a DNS label")
    return name
