"""All NATS subjects, streams and buckets (docs/explanation/architecture.md).

A subject begins with its kind and the namespace, so that NATS permissions can restrict users to their own subjects.
"""

from dataclasses import dataclass

JOBS, PROGRESS, POLICY, REPLICAS, PINS = "jobs", "progress", "policy", "replicas", "pins"
CALIBRATIONS, TENANTS, EXPORTS = "calibrations", "tenants", "exports"
PAST_USE, TENANT_USAGE = "past-use", "usage."
"""A key of the bucket `tenants`, and the prefix of its other keys, one for each tenant."""
TASKS, TURNS, EPISODES, GROUPS, STEPS, EVENTS = "TASKS", "TURNS", "EPISODES", "GROUPS", "STEPS", "EVENTS"


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """Configuration of a stream. work_queue: a message is removed when acked; otherwise it stays up to the limits.

    max_age_s: None keeps messages forever. max_bytes: -1 is unbounded. A full work queue refuses new messages, and so
    does a log with `discard_new`; any other log removes its oldest messages. A larger `max_bytes` that the stream
    already has is kept. max_message_bytes: longer messages are refused; -1 is the server's limit.
    """

    name: str
    subjects: tuple[str, ...]
    work_queue: bool = False
    max_age_s: float | None = None
    max_bytes: int = -1
    max_message_bytes: int = -1
    discard_new: bool = False

    @property
    def refuses_when_full(self) -> bool:
        """Whether a full stream refuses new messages instead of removing old ones."""
        return self.work_queue or self.discard_new


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """Configuration of a key-value bucket. ttl_s: a key expires unless it is written again within this time; None: never.

    max_value_bytes: -1 is the server's limit. by_tenants: pods of tenants write it. No header of a message may then remove
    other keys (`Nats-Rollup: all` would empty the bucket), and keys expire without a marker, which would need that header.
    """

    name: str
    ttl_s: float | None = None
    history: int = 1
    max_value_bytes: int = -1
    by_tenants: bool = False


EPISODE_BYTES = 1 << 20
"""Largest size of a message about an episode. Sandboxes write at most a tenth of it (10,000 turns and a long traceback)."""
STREAMS = (
    StreamSpec(TASKS, ("task.*.*",), work_queue=True),
    # Every turn is needed until its step is recorded; then the orchestrator purges it. A full stream therefore refuses, as back-pressure.
    # The maximum age removes turns that are never purged: a replica can write them after its job was deleted.
    StreamSpec(TURNS, ("turn.*.*.*.*",), max_age_s=30 * 86400.0, max_bytes=8 << 30, discard_new=True),
    # The only stream that tenants' code can fill. Without a bound it could fill the disk and block all writers. Under a flood the oldest
    # messages are removed: the orchestrator has read them, or repeats their episodes when it resumes the job.
    StreamSpec(EPISODES, ("episode.*.*",), max_age_s=7 * 86400.0, max_bytes=4 << 30, max_message_bytes=EPISODE_BYTES),
    # Only the orchestrator writes it. It purges groups of recorded steps, so that the stream holds each job's open steps.
    StreamSpec(GROUPS, ("group.*.*",)),
    StreamSpec(STEPS, ("step.*.*.*", "eval.*.*.*")),
    StreamSpec(EVENTS, ("event.*.*.>",), max_age_s=86400.0, max_bytes=64 << 20),
)
REPLICA_TTL_S = 10.0
TASK_ACK_WAIT_S = 10.0
"""Sandboxes send in_progress for a claimed task more often than this. After it, the tasks of a sandbox that exited go to others."""
BUCKETS = (
    BucketSpec(JOBS),
    BucketSpec(PROGRESS),
    BucketSpec(POLICY, history=8),
    BucketSpec(TENANTS),
    BucketSpec(REPLICAS, ttl_s=REPLICA_TTL_S),
    BucketSpec(PINS, ttl_s=2 * 86400.0),
    BucketSpec(CALIBRATIONS),
    # An exporter writes its key anew at least every hour while its job runs.
    BucketSpec(EXPORTS, ttl_s=7 * 86400.0, max_value_bytes=16 << 10, by_tenants=True),
)
ROLLUP_FREE = frozenset(bucket.name for bucket in BUCKETS if bucket.by_tenants)


def task(namespace: str, job: str) -> str:
    """Subject of a job's tasks, which its sandboxes claim."""
    return f"task.{namespace}.{job}"


def generation(namespace: str, job: str, agent: str) -> str:
    """Subject of a job's generation requests for one agent, sent by its sandboxes."""
    return f"gen.{namespace}.{job}.{agent}"


def is_reply_of(namespace: str, job: str, reply: str) -> bool:
    """Whether an answer to a request of this job may go to this reply subject.

    Allowed are the job's own inbox, the default inbox of a bus without user credentials, and the subject that NATS
    substitutes between accounts. NATS permissions do not cover the reply subject of a request.
    """
    return reply.startswith((f"_INBOX_{namespace}_{job}.", "_INBOX.", "_R_."))


def engine(pool: str, replica: str) -> str:
    """Subject of requests that are forwarded to the rollout replica that owns the episode."""
    return f"engine.{pool}.{replica}"


def turn(namespace: str, job: str, episode: str, number: int | str) -> str:
    """Subject of one recorded turn (`*` for all turns of the episode)."""
    return f"turn.{namespace}.{job}.{episode}.{number}"


def episode(namespace: str, job: str) -> str:
    """Subject of a job's finished episodes."""
    return f"episode.{namespace}.{job}"


def job_log(namespace: str, job: str) -> str:
    """Subject of a job's log: the tasks issued, the groups decided and the steps closed, in order."""
    return f"group.{namespace}.{job}"


def step(namespace: str, job: str, uid: str, number: int | str) -> str:
    """Subject of the record of one finished step."""
    return f"step.{namespace}.{job}.{uid}-{number}"


def evaluation(namespace: str, job: str, uid: str, version: int | str) -> str:
    """Subject of the record of one evaluation."""
    return f"eval.{namespace}.{job}.{uid}-{version}"


def export(namespace: str, job: str) -> str:
    """Subject of requests of a job's exporter for the files of a published adapter."""
    return f"export.{namespace}.{job}"


def event(namespace: str, job: str, role: str) -> str:
    """Subject of a job's events, for people."""
    return f"event.{namespace}.{job}.{role}"


def job_key(namespace: str, job: str) -> str:
    """Key of a job in the buckets `jobs`, `progress` and `exports`."""
    return f"{namespace}.{job}"


def tenant_usage_key(tenant: str) -> str:
    """Key of a tenant's usage in the bucket `tenants`."""
    return f"{TENANT_USAGE}{tenant}"


def policy_key(namespace: str, job: str, agent: str) -> str:
    """Key of an agent's policy in the bucket `policy`."""
    return f"{namespace}.{job}.{agent}"


def pin_key(namespace: str, job: str, agent: str, group_name: str) -> str:
    """Key of the version to which a group is pinned, in the bucket `pins`."""
    return f"{namespace}.{job}.{agent}.{group_name}"


def replica_key(role: str, pool: str, replica: str) -> str:
    """Key of a replica's report in the bucket `replicas`."""
    return f"{role}.{pool}.{replica}"


def calibration_key(pool: str, dtype: str) -> str:
    """Key of a pool's calibration for engines that compute in `dtype`, in the bucket `calibrations`."""
    return f"{pool}.{dtype}"


def consumer(namespace: str, job: str, *parts: str) -> str:
    """Name of a durable consumer. DNS labels contain no underscore, so two jobs never share a name."""
    return "_".join((namespace, job, *parts))
