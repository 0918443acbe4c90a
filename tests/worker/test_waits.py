"""The failures that jobs wait for, as a replica reports them."""

from contextlib import suppress

from marlaas_api.blobs import BlobUnavailable
from marlaas_worker.waits import KEPT_S, SILENT_S, Waits


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
