"""Kubernetes events: the sentences of `kubectl describe`. Pure.

kubectl sorts by a time that these events may not have, and so shows them in the order of their names.
"""

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime

from marlaas_operator.cluster import Body
from marlaas_operator.plan import Event

CONTROLLER = "marlaas.dev/operator"
_LONGEST_NOTE = 1024
_LONGEST_NAME = 220


def event_bodies(regarding: Body, events: Sequence[Event], instance: str, now: float) -> list[Body]:
    """The event objects about `regarding` as it was observed, in their order. A name follows from both, so that each is made once."""
    return [_event_body(regarding, (place, event), instance, now) for place, event in enumerate(events)]


def _event_body(regarding: Body, placed: tuple[int, Event], instance: str, now: float) -> Body:
    meta = regarding["metadata"]
    place, event = placed
    told = "|".join((meta["uid"], str(meta["resourceVersion"]), event.type, event.reason, event.message))
    digest = hashlib.sha256(told.encode()).hexdigest()[:8]
    name = f"{meta['name'][:_LONGEST_NAME]}.{int(meta['resourceVersion']):016x}{place:02x}{digest}"
    namespace = meta.get("namespace") or "default"
    reference = {
        "apiVersion": regarding["apiVersion"],
        "kind": regarding["kind"],
        "name": meta["name"],
        "uid": meta["uid"],
    }
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": namespace},
        "eventTime": datetime.fromtimestamp(now, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "reportingController": CONTROLLER,
        "reportingInstance": instance[:128],
        "regarding": reference | ({"namespace": meta["namespace"]} if meta.get("namespace") else {}),
        "action": event.reason,
        "reason": event.reason,
        "note": event.message[:_LONGEST_NOTE],
        "type": event.type,
    }
