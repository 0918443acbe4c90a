"""All time is virtual: what the operator waits for takes none."""

import pytest

from tests import virtual_time

event_loop_policy = virtual_time.event_loop_policy
monotonic = virtual_time.monotonic


@pytest.fixture(autouse=True)
def virtual(monotonic: None) -> None:
    """`time.monotonic()` follows the loop."""
