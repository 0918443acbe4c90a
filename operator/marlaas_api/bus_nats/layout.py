"""Streams and buckets as JetStream configurations. Pure: what to ask for, and whether anything has to be asked."""

from collections.abc import Mapping

from marlaas_api.subjects import BucketSpec, StreamSpec

DUPLICATE_WINDOW_S = 120.0
_MARKER_TTL_S = 60.0

Config = dict[str, object]


def nanoseconds(seconds: float) -> int:
    """JetStream's unit of time."""
    return int(seconds * 1e9)


def bucket_stream(bucket: str) -> str:
    """The stream behind a bucket."""
    return f"KV_{bucket}"


def bucket_subject(bucket: str, key: str) -> str:
    """The subject that holds a key (or, ending in `>`, many keys)."""
    return f"$KV.{bucket}.{key}"


def stream_config(spec: StreamSpec) -> Config:
    """A stream in a file, readable directly."""
    return {
        "name": spec.name,
        "subjects": list(spec.subjects),
        "retention": "workqueue" if spec.work_queue else "limits",
        "discard": "new" if spec.refuses_when_full else "old",
        "max_bytes": spec.max_bytes,
        "max_msg_size": spec.max_message_bytes,
        **_common(spec.max_age_s),
    }


def bucket_config(spec: BucketSpec) -> Config:
    """The stream behind a bucket, laid out as every NATS client does it (ADR-8).

    With a TTL, the server puts a marker in the place of an expired key, so that watchers hear of it.
    """
    markers: Config = {} if spec.ttl_s is None else {"subject_delete_marker_ttl": nanoseconds(_MARKER_TTL_S)}
    return {
        "name": bucket_stream(spec.name),
        "subjects": [bucket_subject(spec.name, ">")],
        "retention": "limits",
        "discard": "new",
        "max_msgs_per_subject": spec.history,
        "allow_rollup_hdrs": True,
        "allow_msg_ttl": True,
        "deny_delete": True,
        **markers,
        **_common(spec.ttl_s),
    }


def _common(max_age_s: float | None) -> Config:
    window_s = DUPLICATE_WINDOW_S if max_age_s is None else min(max_age_s, DUPLICATE_WINDOW_S)
    return {
        "storage": "file",
        "allow_direct": True,
        "max_age": nanoseconds(max_age_s or 0.0),
        "duplicate_window": nanoseconds(window_s),
    }


def merged(existing: Mapping[str, object], wanted: Config) -> Config | None:
    """The update that an existing stream needs, or None. What we do not speak of (replicas, placement) stays as it is, and so does a
    larger bound: that is how a platform team enlarges a stream."""
    found, least = existing.get("max_bytes"), wanted.get("max_bytes")
    if isinstance(found, int) and isinstance(least, int) and found > least > 0:
        wanted = {**wanted, "max_bytes": found}
    if all(existing.get(key) == value for key, value in wanted.items()):
        return None
    return {**existing, **wanted}
