"""The retry loop of all roles: its pauses, what it logs, and which errors it raises."""

import asyncio
import logging

import pytest

from marlaas_api.bus import BusRefused, BusUnavailable
from marlaas_api.errors import Unreadable
from marlaas_api.retries import SERIES_S, patiently
from tests import virtual_time

event_loop_policy = virtual_time.event_loop_policy


def failing(*calls):
    """Return a call that takes the seconds and raises the error of each pair, and then returns the times at which it was called."""
    left, times = list(calls), []

    async def call():
        times.append(asyncio.get_running_loop().time())
        if not left:
            return [round(at - times[0], 6) for at in times[1:]]
        seconds, error = left.pop(0)
        await asyncio.sleep(seconds)
        raise error

    return call


async def test_pauses_grow_and_a_failure_after_a_long_call_is_a_first_one_again(caplog):
    away, refused = BusUnavailable("away"), BusRefused("refused")
    call = failing((0, away), (0, away), (0, refused), (0, refused), (SERIES_S + 1, refused))
    assert await patiently(call, "a write", 1.0, longest_s=3.0, retried=lambda _: True) == [
        1,
        3,
        6,
        9,
        9 + SERIES_S + 2,
    ]
    logged = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert logged == [f"a write: {text}; retrying" for text in ("away", "refused", "refused")]


@pytest.mark.parametrize("error", [Unreadable("of a later release"), BusRefused("refused"), LookupError("a bug")])
async def test_errors_that_a_repetition_cannot_pass_are_raised(error):
    with pytest.raises(type(error)):
        await patiently(failing((0, error)), "a read", 1.0)
