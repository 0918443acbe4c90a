"""Bodies of Kubernetes events, which `kubectl describe` shows. Pure.

kubectl sorts events by a timestamp that events.k8s.io/v1 may lack, and then by name; so the names are in
chronological order.
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
    """Return the event objects about `regarding`, in order.

    An event's name is derived from the observed object and the event, so that each is created only once.
    """
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
