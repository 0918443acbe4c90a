"""What an attacker with a sandbox's credential tries: every verb on every subject, stream, bucket and consumer that is not its job's."""

import itertools
import json
from collections.abc import Collection

from tests.tables import data

from marlaas_api import subjects
from marlaas_api.bus_users import ExporterUser, OrchestratorUser, RolloutUser, SandboxUser, TenantUser, inbox_prefix

MINE, OTHER = SandboxUser("team-a", "mine", "u1"), SandboxUser("team-b", "other", "u2")
SIBLING = SandboxUser("team-a", "sibling", "u3")
"""A job of the attacker's own namespace: not its own either."""
JOBS = (MINE, OTHER, SIBLING)
OWN: dict[TenantUser, tuple[str, ...]] = {
    MINE: (subjects.generation("team-a", "mine", "policy"), subjects.episode("team-a", "mine")),
    ExporterUser("team-a", "mine", "u1"): ("$KV.exports.team-a.mine", subjects.export("team-a", "mine")),
}
"""What an attacker's credential may publish, besides requests."""
STORED = (*(one.name for one in subjects.STREAMS), *(f"KV_{one.name}" for one in subjects.BUCKETS))
STREAMS = (*STORED, "OBJ_models", "*", ">")
_STREAM_VERBS = ("INFO", "DELETE", "UPDATE", "PURGE", "SNAPSHOT", "RESTORE", "LEADER.STEPDOWN", "PEER.REMOVE")
_CONSUMER_VERBS = ("INFO", "DELETE", "PAUSE", "LEADER.STEPDOWN", "UNPIN", "RESET")


def consumer(user: SandboxUser, *parts: str) -> str:
    return subjects.consumer(user.namespace, user.job, *(parts or ("sandbox",)))


def names(user: SandboxUser) -> list[str]:
    """Every subject that carries a job's name."""
    ns, job = user.namespace, user.job
    return [
        subjects.task(ns, job),
        subjects.generation(ns, job, "policy"),
        subjects.turn(ns, job, "u-t0-0-1", 0),
        subjects.episode(ns, job),
        subjects.job_log(ns, job),
        subjects.step(ns, job, user.uid, 0),
        subjects.evaluation(ns, job, user.uid, 0),
        subjects.export(ns, job),
        subjects.event(ns, job, "sandbox"),
        *(f"$KV.{bucket.name}.{ns}.{job}" for bucket in subjects.BUCKETS),
        *(f"$KV.{bucket.name}.{ns}.{job}.policy" for bucket in subjects.BUCKETS),
    ]


def targets(mine: Collection[str]) -> list[str]:
    """Subjects of others, of the platform and of the server, and wildcards over them. mine: what the attacker may publish."""
    foreign = [subject for user in JOBS for subject in names(user) if subject not in mine]
    users = OTHER, SIBLING, RolloutUser("tiny"), OrchestratorUser()
    inboxes = [f"{inbox_prefix(user)}.abc" for user in users]
    return [*foreign, subjects.engine("tiny", "rollout-0"), *inboxes, *data(__file__, "platform")]


def wildcards() -> list[str]:
    made = data(__file__, "wildcards")
    return [*(shape.format(kind) for kind in made["kinds"] for shape in made["shapes"]), *made["others"]]


def api_calls() -> list[tuple[str, bytes]]:
    """JetStream's API: every verb on every stream and consumer, with bodies that name what the subject does not."""
    own = consumer(MINE)
    consumers = [own, consumer(OTHER), consumer(SIBLING), consumer(OTHER, "orchestrator"), "fresh"]
    calls = [(verb, b"") for verb in ("INFO", "STREAM.NAMES", "STREAM.LIST", "META.LEADER.STEPDOWN", "SERVER.REMOVE")]
    calls += [(f"ACCOUNT.{verb}.MARLAAS", b"") for verb in ("PURGE", "STREAM.MOVE")]
    spec = {"name": "fresh", "durable_name": "fresh", "ack_policy": "none", "deliver_subject": "_INBOX_team-a_mine.x"}
    for stream in STREAMS:
        filters = json.dumps({"subjects_filter": ">"}).encode()
        calls += [(f"STREAM.{verb}.{stream}", filters if verb == "INFO" else b"") for verb in _STREAM_VERBS]
        calls.append((f"STREAM.PURGE.{stream}", json.dumps({"filter": "task.team-b.other"}).encode()))
        calls.append((f"STREAM.CREATE.{stream}", json.dumps({"name": stream, "subjects": ["x.>"]}).encode()))
        calls += [(f"STREAM.MSG.{verb}.{stream}", b'{"seq":1}') for verb in ("GET", "DELETE")]
        calls += [(f"DIRECT.GET.{stream}", body) for body in (b'{"seq":1}', b'{"next_by_subj":">","batch":9,"seq":1}')]
        named = ("task.team-b.other", "$KV.jobs.team-b.other", ">")
        calls += [(f"DIRECT.GET.{stream}.{subject}", b"") for subject in named]
        calls += [(f"CONSUMER.{verb}.{stream}", b"") for verb in ("NAMES", "LIST")]
        for name in consumers:
            body = json.dumps({"stream_name": stream, "config": {**spec, "name": name, "durable_name": name}}).encode()
            create = ("CREATE.{}", "CREATE.{}.{}", "CREATE.{}.{}.>", "DURABLE.CREATE.{}.{}")
            calls += [(f"CONSUMER.{verb.format(stream, name)}", body) for verb in create]
            calls += [(f"CONSUMER.{verb}.{stream}.{name}", b"") for verb in _CONSUMER_VERBS]
            if (stream, name) != (subjects.TASKS, own):
                calls.append((f"CONSUMER.MSG.NEXT.{stream}.{name}", b""))
    return [(f"$JS.API.{call}", body) for call, body in calls]


def acks() -> list[tuple[str, bytes]]:
    """Settling what others have claimed, in both forms of ack subjects, also ones that hide another stream's in the longer form."""
    theirs = [(subjects.TASKS, consumer(user)) for user in (OTHER, SIBLING)]
    theirs.append((subjects.EPISODES, consumer(OTHER, "orchestrator")))
    subjects_ = [f"$JS.ACK.{stream}.{name}.1.1.1.1.0" for stream, name in theirs]
    subjects_ += [f"$JS.ACK._.ACCOUNT.{stream}.{name}.1.1.1.1.0" for stream, name in theirs]
    subjects_ += [f"$JS.ACK.{stream}.{name}.TASKS.{consumer(MINE)}.1.1.0" for stream, name in theirs]
    return list(itertools.product(subjects_, (b"+ACK", b"-NAK", b"+TERM", b"+WPI", b"+NXT", b"")))
