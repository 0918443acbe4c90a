"""Share of the CPU of environments beside the engine and the trainer of the same machine."""

import os
from pathlib import Path

import pytest

from marlaas_api import cpu_shares
from marlaas_worker.sandbox import forkserver, server_start
from marlaas_worker.sandbox.forkserver import CpuShare

has_autogroups = pytest.mark.skipif(
    not Path("/proc/self/autogroup").exists(),
    reason="this kernel has no CPU shares of sessions (CONFIG_SCHED_AUTOGROUP)",
)


@has_autogroups
@pytest.mark.processes
async def test_an_environment_that_computes_for_long_gets_a_low_share(harness, monkeypatch):
    monkeypatch.setattr(forkserver, "ALLOWANCE", 0.0)  # a loaded machine must not give it time to save any
    document, low = harness.document("shares:computes"), cpu_shares.LOW_SHARE
    async with harness.open(document):
        await harness.put_task(harness.task(document))
        (first,) = await harness.episodes(1)
        await harness.put_task(harness.task(document, 1))
        _, second = await harness.episodes(2, start=2)
    assert first.metrics == {"first": 0.0, "session": low, "process": low}
    assert second.metrics == {"first": low, "session": low, "process": low}


def test_the_share_is_low_while_more_is_used_than_allowed_and_until_half_a_burst_is_saved():
    share = CpuShare(at=100.0)
    assert not share.note(0.5, 100.0)
    assert not share.note(1.5, 110.0), "a tenth of the time"
    assert share.note(1.6, 110.5)
    assert share.note(30.0, 140.5), "only a burst is owed"
    assert share.note(29.0, 147.9)
    assert not share.note(30.0, 148.1)
    assert not share.note(30.0, 1000.0)
    assert share.note(30.6, 1000.1), "only a burst is saved"


@has_autogroups
async def test_an_environment_that_begins_a_session_gets_no_full_share(harness):
    (episode,) = await harness.play("shares:escapes")
    assert episode.metrics == {"session": cpu_shares.LOW_SHARE}


@has_autogroups
@pytest.mark.processes
async def test_an_environment_that_is_loaded_for_long_has_a_low_share(harness, monkeypatch):
    monkeypatch.setattr(server_start, "FULL_SHARE_S", 0.0)
    (episode,) = await harness.play("shares:Loads", args={"until_low": True})
    assert episode.metrics["last"] == cpu_shares.LOW_SHARE, "`first` is full if it begins before the share is set"


def test_an_engine_has_a_full_share_once_a_request_has_waited_for_a_tenth_of_a_second():
    found = [cpu_shares.engine_share(wait_s) for wait_s in (0.0, 0.1, 0.11)]
    assert found == [cpu_shares.COMPUTE_SHARE, cpu_shares.COMPUTE_SHARE, cpu_shares.FULL_SHARE]


async def test_a_share_that_the_kernel_refuses_now_is_set_later(tmp_path, monkeypatch):
    share, refusals, write = tmp_path / "7", [True, True], os.write
    share.write_text("/autogroup-7 nice 0")

    def refusing(descriptor, text):
        if refusals and refusals.pop():
            raise BlockingIOError
        return write(descriptor, text)

    monkeypatch.setattr(cpu_shares, "_AUTOGROUP", f"{tmp_path}/{{}}")
    monkeypatch.setattr(cpu_shares, "_RETRY_S", 0.0)
    monkeypatch.setattr(os, "write", refusing)
    await cpu_shares.set_share_soon(7, cpu_shares.COMPUTE_SHARE)
    assert share.read_text().startswith("5")
    assert not refusals
