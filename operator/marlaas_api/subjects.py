"""Every NATS subject, stream and bucket, in one place (DESIGN, "NATS JetStream and blobs").

A subject begins with its kind and the namespace, so that NATS permissions can say who may say what.
"""

from dataclasses import dataclass

JOBS, PROGRESS, POLICY, REPLICAS, PINS, LEDGER = "jobs", "progress", "policy", "replicas", "pins", "ledger"
CALIBRATIONS = "calibrations"
TASKS, TURNS, EPISODES, GROUPS, STEPS, EVENTS = "TASKS", "TURNS", "EPISODES", "GROUPS", "STEPS", "EVENTS"


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """What a stream holds. `work_queue`: a message is gone once acked; otherwise it stays up to the limits.

    max_age_s: None keeps for ever. max_bytes: -1 is unbounded; a full work queue refuses, and so does a log with `discard_new`; any other log
    forgets its oldest. A larger max_bytes that somebody gave the stream stays. max_message_bytes: a longer message is refused; -1 takes
    what the server takes.
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
        """Whether a full stream refuses new messages rather than forget old ones."""
        return self.work_queue or self.discard_new


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """A key-value bucket; with `ttl_s` a key vanishes unless it is written again within that time."""

    name: str
    ttl_s: float | None = None
    history: int = 1


EPISODE_BYTES = 1 << 20
"""Longest message about an episode. The longest that sandboxes write, of 10,000 turns and with a long traceback, has a tenth of it."""
STREAMS = (
    StreamSpec(TASKS, ("task.*.*",), work_queue=True),
    # Every turn is live until its step is on record; then the orchestrator purges it. So a full stream refuses: that is back-pressure.
    # The age is for turns that nobody purges: those of a replica that wrote after its job was deleted.
    StreamSpec(TURNS, ("turn.*.*.*.*",), max_age_s=30 * 86400.0, max_bytes=8 << 30, discard_new=True),
    # The one stream that tenants' code can fill. A flood pushes out what is old, which an orchestrator has read, or has played again when
    # it takes the job up anew; without a bound it would fill the disk, and nobody could write anything.
    StreamSpec(EPISODES, ("episode.*.*",), max_age_s=7 * 86400.0, max_bytes=4 << 30, max_message_bytes=EPISODE_BYTES),
    # The orchestrator alone writes it, and purges what belongs to steps on record: it holds each job's open steps.
    StreamSpec(GROUPS, ("group.*.*.*",)),
    StreamSpec(STEPS, ("step.*.*.*", "eval.*.*.*")),
    StreamSpec(EVENTS, ("event.*.*.>",), max_age_s=86400.0, max_bytes=64 << 20),
)
REPLICA_TTL_S = 10.0
TASK_ACK_WAIT_S = 10.0
"""A sandbox that claims a task says in_progress more often than this; one that died gives its tasks to others after it."""
BUCKETS = (
    BucketSpec(JOBS),
    BucketSpec(PROGRESS),
    BucketSpec(POLICY, history=8),
    BucketSpec(LEDGER),
    BucketSpec(REPLICAS, ttl_s=REPLICA_TTL_S),
    BucketSpec(PINS, ttl_s=2 * 86400.0),
    BucketSpec(CALIBRATIONS),
)


def task(namespace: str, job: str) -> str:
    """Tasks of a job, claimed by its sandboxes."""
    return f"task.{namespace}.{job}"


def generation(namespace: str, job: str, agent: str) -> str:
    """Requests of a job's sandboxes for turns of one agent."""
    return f"gen.{namespace}.{job}.{agent}"


def is_reply_of(namespace: str, job: str, reply: str) -> bool:
    """Whether an answer to a request of this job may go there: its own inbox, an unfenced user's, or what NATS puts in its place on the
    way between accounts. A reply subject is the one thing of a request that no permission looks at."""
    return reply.startswith((f"_INBOX_{namespace}_{job}.", "_INBOX.", "_R_."))


def engine(pool: str, replica: str) -> str:
    """Requests forwarded to the rollout replica that owns the episode."""
    return f"engine.{pool}.{replica}"


def turn(namespace: str, job: str, episode: str, number: int | str) -> str:
    """One recorded turn (`*` for all turns of the episode)."""
    return f"turn.{namespace}.{job}.{episode}.{number}"


def episode(namespace: str, job: str) -> str:
    """Finished episodes of a job."""
    return f"episode.{namespace}.{job}"


def group(namespace: str, job: str, agent: str) -> str:
    """Groups assigned to steps, and the closing of steps, in order."""
    return f"group.{namespace}.{job}.{agent}"


def step(namespace: str, job: str, uid: str, number: int | str) -> str:
    """The record of one finished step."""
    return f"step.{namespace}.{job}.{uid}-{number}"


def evaluation(namespace: str, job: str, uid: str, version: int | str) -> str:
    """The record of one evaluation."""
    return f"eval.{namespace}.{job}.{uid}-{version}"


def event(namespace: str, job: str, role: str) -> str:
    """The story of a job, for people."""
    return f"event.{namespace}.{job}.{role}"


def job_key(namespace: str, job: str) -> str:
    """Key of a job in the buckets `jobs` and `progress`."""
    return f"{namespace}.{job}"


def policy_key(namespace: str, job: str, agent: str) -> str:
    """Key of an agent's policy."""
    return f"{namespace}.{job}.{agent}"


def pin_key(namespace: str, job: str, agent: str, group_name: str) -> str:
    """Key of the version to which a group is pinned."""
    return f"{namespace}.{job}.{agent}.{group_name}"


def replica_key(role: str, pool: str, replica: str) -> str:
    """Key of a replica's report."""
    return f"{role}.{pool}.{replica}"


def calibration_key(pool: str, dtype: str) -> str:
    """Key of a pool's calibration for engines that compute in `dtype`."""
    return f"{pool}.{dtype}"


def consumer(namespace: str, job: str, *parts: str) -> str:
    """Name of a durable consumer. Underscores occur in no DNS label, so two jobs never share one."""
    return "_".join((namespace, job, *parts))
