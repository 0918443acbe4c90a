"""Prometheus metrics of a rollout replica besides those of its report (`metrics.of_report`). Pure."""

from collections.abc import Sized

from marlaas_worker.metrics import Sample
from marlaas_worker.rollout.engine_progress import EngineCounts
from marlaas_worker.rollout.reload_pace import ReloadPace
from marlaas_worker.rollout.request_limiter import RequestLimiter


def of_versions(verified: Sized, pace: ReloadPace, slots: int) -> list[Sample]:
    """Return the metrics of adapter versions and their loads.

    verified: the versions that may be served. pace: counts and times the loads. slots: number of adapter slots.
    """
    return [
        Sample("marlaas_rollout_slots", "gauge", "Adapter slots of the engine.", slots),
        Sample("marlaas_rollout_versions", "gauge", "Adapter versions that may be served.", len(verified)),
        Sample("marlaas_rollout_loads_total", "counter", "Adapter versions loaded and proven.", pace.num_loads),
        Sample("marlaas_rollout_reloads_total", "counter", "Loads of evicted versions.", pace.num_reloads),
        Sample("marlaas_rollout_load_seconds_total", "counter", "Engine time of all loads.", pace.load_s),
        Sample("marlaas_rollout_reload_seconds_total", "counter", "Engine time of re-loads.", pace.reload_s),
    ]


def of_places(limiter: RequestLimiter, turns_waiting: int) -> list[Sample]:
    """Return the metrics of waiting requests, of reserved KV cache tokens, and of turns that wait to be recorded.

    limiter: of the engine's requests. turns_waiting: number of generated turns for which the turns stream has no room.
    """
    reserved = limiter.budget.num_reserved
    return [
        Sample("marlaas_rollout_waiting", "gauge", "Requests that wait for a place in the batch.", limiter.num_waiting),
        Sample("marlaas_rollout_turns_waiting", "gauge", "Turns that wait: the stream is full.", turns_waiting),
        Sample("marlaas_rollout_kv_tokens_reserved", "gauge", "Tokens reserved by requests.", reserved),
    ]


def of_engine(counts: EngineCounts, kv_tokens: int, restarts: int) -> list[Sample]:
    """Return the metrics of the engine. While `RequestLimiter` works, the engine's own queue is empty and it preempts no request.

    Args:
        counts: the engine's own counters.
        kv_tokens: tokens that fit into the KV cache; 0 if unknown.
        restarts: number of successful restarts of the engine since the role's start.
    """
    name = "marlaas_rollout_engine"
    return [
        Sample("marlaas_rollout_kv_tokens", "gauge", "Tokens that fit into the KV cache.", kv_tokens),
        Sample(f"{name}_restarts_total", "counter", "Restarts of the engine.", restarts),
        Sample(f"{name}_requests_total", "counter", "Requests that the engine received.", counts.requests),
        Sample(f"{name}_preemptions_total", "counter", "Requests whose KV cache it took away.", counts.preemptions),
        Sample(f"{name}_steps_total", "counter", "Batches.", counts.steps),
        Sample(f"{name}_queued_steps_total", "counter", "Batches without room for all.", counts.queued_steps),
        Sample(f"{name}_queue", "gauge", "Requests for which the last batch had no room.", counts.queued),
    ]
