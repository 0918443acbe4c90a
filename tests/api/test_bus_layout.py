"""What is asked of JetStream: pure configurations, what its refusals mean, and how a watch outlives its consumer."""

from collections import deque

import pytest
from tests.tables import rows

from marlaas_api.bus import BusUnavailable, Entry
from marlaas_api.bus_nats.layout import bucket_config, merged, stream_config
from marlaas_api.bus_nats.verdicts import verdict
from marlaas_api.bus_nats.watches import BucketWatch
from marlaas_api.subjects import BucketSpec, StreamSpec
from tests import virtual_time

event_loop_policy = virtual_time.event_loop_policy


@pytest.mark.parametrize(("ttl_s", "window_s"), [(None, 120), (10.0, 10), (3600.0, 120)])
def test_duplicates_are_remembered_two_minutes_but_never_longer_than_messages(ttl_s, window_s):
    assert bucket_config(BucketSpec("b", ttl_s=ttl_s))["duplicate_window"] == window_s * 10**9


def test_what_somebody_else_set_on_a_stream_stays():
    wanted = stream_config(StreamSpec("L", ("l.*",), max_bytes=10))
    existing = {**wanted, "num_replicas": 3, "placement": {"tags": ["ssd"]}}
    assert merged(existing, wanted) is None
    assert merged({**existing, "max_bytes": 5}, wanted) == existing
    assert merged({**existing, "max_bytes": -1}, wanted) == existing
    assert merged({**existing, "max_bytes": 11}, wanted) is None
    larger = {**existing, "max_bytes": 11}
    assert merged({**larger, "discard": "new"}, wanted) == larger


@pytest.mark.parametrize(("code", "kind", "text", "expected"), rows(__file__, "verdicts"))
def test_a_refusal_is_for_now_for_good_or_a_lost_race(code, kind, text, expected):
    error = verdict({"code": code, "err_code": kind, "description": text}, "write")
    assert type(error).__name__ == expected
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


async def test_a_watch_tells_a_key_of_which_an_outage_left_no_marker():
    gone, stays = Entry("gone", b"1", 1), Entry("stays", b"2", 2)
    pages = iter([[gone, stays], [], [stays], []])

    async def page(start: int) -> list[Entry]:
        return next(pages)

    watch = BucketWatch(LostTail(), page, lambda *_: gone)
    assert [await anext(watch) for _ in range(4)] == [gone, stays, stays, Entry("gone", None, 1)]
