"""What is asked of JetStream: pure configurations, what its refusals mean, and how a watch outlives its consumer."""

from collections import deque

import pytest

from marlaas_api.bus import BusRefused, BusUnavailable, Entry, RevisionConflict, StreamFull
from marlaas_api.bus_nats.layout import bucket_config, merged, stream_config
from marlaas_api.bus_nats.verdicts import Missing, verdict
from marlaas_api.bus_nats.watches import BucketWatch
from marlaas_api.subjects import BucketSpec, StreamSpec
from tests import virtual_time

event_loop_policy = virtual_time.event_loop_policy


def test_a_full_work_queue_refuses_and_a_full_log_forgets() -> None:
    assert stream_config(StreamSpec("Q", ("q.*",), work_queue=True))["discard"] == "new"
    assert stream_config(StreamSpec("L", ("l.*",)))["discard"] == "old"


@pytest.mark.parametrize(("ttl_s", "window_s"), [(None, 120), (10.0, 10), (3600.0, 120)])
def test_duplicates_are_remembered_two_minutes_but_never_longer_than_messages(ttl_s, window_s) -> None:
    assert bucket_config(BucketSpec("b", ttl_s=ttl_s))["duplicate_window"] == window_s * 10**9


def test_what_somebody_else_set_on_a_stream_stays() -> None:
    wanted = stream_config(StreamSpec("L", ("l.*",), max_bytes=10))
    existing = {**wanted, "num_replicas": 3, "placement": {"tags": ["ssd"]}}
    assert merged(existing, wanted) is None
    assert merged({**existing, "max_bytes": 5}, wanted) == existing
    assert merged({**existing, "max_bytes": -1}, wanted) == existing
    assert merged({**existing, "max_bytes": 11}, wanted) is None
    larger = {**existing, "max_bytes": 11}
    assert merged({**larger, "discard": "new"}, wanted) == larger


@pytest.mark.parametrize(
    ("code", "kind", "text", "expected"),
    [
        (400, 10071, "wrong last sequence: 3", RevisionConflict),
        (400, 10164, "wrong last sequence", RevisionConflict),
        (503, 10077, "maximum bytes exceeded", StreamFull),
        (503, 10077, "maximum messages per subject exceeded", StreamFull),
        (503, 10077, "error opening msg block file", BusUnavailable),
        (503, 10008, "JetStream system temporarily unavailable", BusUnavailable),
        (429, 10167, "too many requests", BusUnavailable),
        (500, 10047, "insufficient storage resources available", BusUnavailable),
        (500, 10049, "write x.blk: no space left on device", BusUnavailable),
        (500, 10052, "stream configuration update can not change retention policy", BusRefused),
        (400, 10054, "message size exceeds maximum allowed", BusRefused),
        (404, 10059, "stream not found", Missing),
        (404, 10014, "consumer not found", Missing),
    ],
)
def test_a_refusal_is_for_now_for_good_or_a_lost_race(code, kind, text, expected) -> None:
    error = verdict({"code": code, "err_code": kind, "description": text}, "write")
    assert type(error) is expected
    assert str(error).startswith(f"NATS: cannot write: {text}")
    assert ("free disk space" in str(error)) == (kind in (10047, 10049))


class LostTail:
    """A reader whose consumer is lost whenever changes are awaited."""

    def __init__(self) -> None:
        self.arrived: deque[object] = deque()

    async def start(self, sequence: int) -> None:
        """Its consumer starts, and is lost before anything arrives."""

    async def more(self) -> None:
        raise BusUnavailable("lost")


async def test_a_watch_tells_a_key_of_which_an_outage_left_no_marker() -> None:
    gone, stays = Entry("gone", b"1", 1), Entry("stays", b"2", 2)
    pages = iter([[gone, stays], [], [stays], []])

    async def page(start: int) -> list[Entry]:
        return next(pages)

    watch = BucketWatch(LostTail(), page, lambda *_: gone)
    assert [await anext(watch) for _ in range(4)] == [gone, stays, stays, Entry("gone", None, 1)]
