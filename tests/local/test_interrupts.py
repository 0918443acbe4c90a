"""Which signals stop a run."""

import asyncio
import os
import signal

import pytest

from marlaas.local.interrupts import Interrupts


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
async def test_a_signal_that_the_parent_ignores_stays_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)
    interrupts = Interrupts()
    try:
        with interrupts.listening():
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(interrupts.first.wait(), 60)
            assert not interrupts.second.is_set()
            assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
