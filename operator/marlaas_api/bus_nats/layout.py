"""JetStream configurations of streams and buckets, and the comparison with existing ones. Pure."""

from collections.abc import Mapping

from marlaas_api.subjects import BucketSpec, StreamSpec

DUPLICATE_WINDOW_S = 120.0
_MARKER_TTL_S = 60.0

Config = dict[str, object]


def nanoseconds(seconds: float) -> int:
    """Convert to JetStream's unit of time."""
    return int(seconds * 1e9)


def bucket_stream(bucket: str) -> str:
    """Return the name of the stream behind a bucket."""
    return f"KV_{bucket}"


def bucket_subject(bucket: str, key: str) -> str:
    """Return the subject of a key, or of many keys if `key` ends in `>`."""
    return f"$KV.{bucket}.{key}"


def stream_config(spec: StreamSpec) -> Config:
    """Return the configuration of a file-backed stream that allows direct reads."""
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
    """Return the configuration of the stream behind a bucket, in the layout that all NATS clients use (ADR-8).

    With a TTL, the server replaces an expired key by a marker, so that watchers see the removal.
    """
    has_markers = spec.ttl_s is not None and not spec.by_tenants
    markers: Config = {"subject_delete_marker_ttl": nanoseconds(_MARKER_TTL_S)} if has_markers else {}
    bound: Config = {"max_msg_size": spec.max_value_bytes} if spec.max_value_bytes > 0 else {}
    return {
        "name": bucket_stream(spec.name),
        "subjects": [bucket_subject(spec.name, ">")],
        "retention": "limits",
        "discard": "new",
        "max_msgs_per_subject": spec.history,
        "allow_rollup_hdrs": not spec.by_tenants,
        "allow_msg_ttl": True,
        "deny_delete": True,
        **markers,
        **bound,
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
    """Return the update that an existing stream needs, or None.

    Settings that `wanted` does not have (replicas, placement) stay as they are. A larger `max_bytes` stays too, so that
    a platform team can enlarge a stream.
    """
    found, least = existing.get("max_bytes"), wanted.get("max_bytes")
    if isinstance(found, int) and isinstance(least, int) and found > least > 0:
        wanted = {**wanted, "max_bytes": found}
    if all(existing.get(key) == value for key, value in wanted.items()):
        return None
    return {**existing, **wanted}
