"""The limit of loading an environment: extended while the process waits for a CPU, and not while it hangs. In virtual time."""

import json
import socket
from collections.abc import Iterator

import pytest

from marlaas_worker.sandbox.load_report import MAX_EXTENSION, wait_until_loaded
from marlaas_worker.sandbox.server import BrokenEnvironment
from marlaas_worker.sandbox.server_start import _empty_output
from tests import virtual_time

event_loop_policy = virtual_time.event_loop_policy
LIMIT_S = 60.0


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


async def test_an_environment_that_is_short_of_cpu_has_more_time_and_is_loaded_then(ends):
    ours, theirs = ends
    readings = []

    def cpu_wait_s() -> float:
        readings.append(0.9 * LIMIT_S * (len(readings) + 1))
        if len(readings) == 4:
            theirs.send(json.dumps({"report": "ready"}).encode())
        return readings[-1]

    await wait_until_loaded(ours, _empty_output(), LIMIT_S, cpu_wait_s)
    assert virtual_time.now() - virtual_time.START == 4 * LIMIT_S


@pytest.mark.parametrize(
    ("part", "waited"),
    [(0.0, 1), (0.4, 1), (0.9, MAX_EXTENSION), (None, 1)],
    ids=["hangs or computes", "waits a little", "is short of CPU for ever", "in a container of its own"],
)
async def test_an_environment_is_given_up_after_its_limit_unless_it_waits_for_a_cpu(ends, part, waited):
    at = 0.0

    def cpu_wait_s() -> float:
        nonlocal at
        at += part * LIMIT_S
        return at

    with pytest.raises(BrokenEnvironment, match=f"took longer than {waited * LIMIT_S:g} s"):
        await wait_until_loaded(ends[0], _empty_output(), LIMIT_S, None if part is None else cpu_wait_s)
