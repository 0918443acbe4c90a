"""Errors of devices sorted by the words of drivers and libraries, and the failures that jobs wait for."""

import builtins
from contextlib import suppress

import pytest
from tests.tables import rows

from marlaas_api.blobs import BlobUnavailable
from marlaas_worker.device_errors import first_line, is_out_of_memory, says_lost
from marlaas_worker.waits import KEPT_S, SILENT_S, Waits


@pytest.mark.parametrize(("error", "expected"), rows(__file__, "errors"))
def test_an_error_is_of_a_lost_device_of_memory_or_neither(error, expected):
    kind, *words = error
    error = getattr(builtins, kind)(*words)
    assert [says_lost(str(error)), is_out_of_memory(error)] == expected


def test_of_a_long_error_the_first_line_is_told():
    assert first_line(RuntimeError("CUDA error: unknown\nFor debugging ...")) == "RuntimeError: CUDA error: unknown"
    assert first_line(MemoryError()) == "MemoryError: no words"


async def test_calls_that_a_silent_store_lets_time_out_are_one_wait_since_the_first_one_began():
    now = [100.0]
    waits = Waits(lambda: now[0])
    for _ in range(3):
        with suppress(BlobUnavailable):
            async with waits.watched("u", "write", "x"):
                now[0] += SILENT_S + 1 + 4 * KEPT_S
                assert waits.reported()["u"].since == 100.0
                raise BlobUnavailable("operation timed out")
        assert waits.reported()["u"].since == 100.0
        now[0] += KEPT_S / 2
