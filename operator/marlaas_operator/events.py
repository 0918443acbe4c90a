"""Kubernetes events: the sentences of `kubectl describe`. Pure."""

import hashlib
from datetime import UTC, datetime

from marlaas_operator.cluster import Body
from marlaas_operator.plan import Event

CONTROLLER = "marlaas.dev/operator"
_LONGEST_NOTE = 1024
_LONGEST_NAME = 230


def event_body(regarding: Body, event: Event, instance: str, now: float) -> Body:
    """The event object about `regarding` as it was observed. Its name follows from both, so that it is made once."""
    meta = regarding["metadata"]
    told = "|".join((meta["uid"], str(meta["resourceVersion"]), event.type, event.reason, event.message))
    name = f"{meta['name'][:_LONGEST_NAME]}.{hashlib.sha256(told.encode()).hexdigest()[:16]}"
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
