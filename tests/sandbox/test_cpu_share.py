"""Share of the CPU of environments beside the engine and the trainer of the same machine."""

import contextlib
import os
import time
from pathlib import Path

import pytest

from marlaas_api import cpu_shares
from marlaas_worker.sandbox import cpu_share, server_start
from marlaas_worker.sandbox.cpu_share import CpuShare

has_autogroups = pytest.mark.skipif(
    not Path("/proc/self/autogroup").exists(),
    reason="this kernel has no CPU shares of sessions (CONFIG_SCHED_AUTOGROUP)",
)


@pytest.fixture(autouse=True)
def _own_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(server_start, "_LOCK", tmp_path / "loading.lock")


def _change_share(niceness):
    """Change the share of the session of this process. Retry: without CAP_SYS_ADMIN, the kernel allows ten changes a second in all."""
    deadline = time.monotonic() + 30.0
    while not cpu_shares.set_share(os.getpid(), niceness):
        assert time.monotonic() < deadline, f"the kernel does not set the share {niceness} for user {os.geteuid()}"
        time.sleep(0.02)


@pytest.fixture
def supervisors_share():
    """The share of the session of this process, which is the supervisor of the harness, made smaller."""
    if not Path("/proc/self/autogroup").read_text():
        with contextlib.suppress(PermissionError):
            os.setsid()  # what init started, without a session of its own (CI is), has no share that could be changed
    if not Path("/proc/self/autogroup").read_text():
        pytest.skip("this process is in init's session, whose share cannot be changed, and leads its process group")
    before, smaller = cpu_shares.share_of(os.getpid()), 3
    _change_share(smaller)
    yield smaller
    _change_share(before)


@has_autogroups
async def test_an_environment_has_the_share_of_its_supervisor(harness, supervisors_share):
    (episode,) = await harness.play("shares:share")
    assert episode.metrics == {"session": supervisors_share, "process": 0.0}


@has_autogroups
@pytest.mark.processes
async def test_an_environment_that_computes_for_long_gets_a_low_share(harness, monkeypatch):
    monkeypatch.setattr(cpu_share, "ALLOWANCE", 0.0)  # a loaded machine must not give it time to save any
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
@pytest.mark.parametrize("beside", [True, False], ids=["beside another", "for longer than it may"])
async def test_an_environment_that_is_loaded_beside_another_or_for_long_has_a_low_share(harness, monkeypatch, beside):
    monkeypatch.setattr(server_start, "FULL_SHARE_S", 3600.0 if beside else 0.0)
    with server_start.loads_alone() if beside else contextlib.nullcontext():
        (episode,) = await harness.play("shares:Loads", args={"until_low": True})
    assert episode.metrics["last"] == cpu_shares.LOW_SHARE, "`first` is full if it begins before the share is set"


def test_one_process_at_a_time_loads_alone(tmp_path, monkeypatch):
    with server_start.loads_alone() as first, server_start.loads_alone() as second:
        assert (first, second) == (True, False)
    with server_start.loads_alone() as later:
        assert later
    monkeypatch.setattr(server_start, "_LOCK", tmp_path / "missing" / "lock")
    with server_start.loads_alone() as without:
        assert not without


def test_an_engine_has_a_full_share_while_agents_outnumber_its_slots_and_so_has_an_unknown_process():
    assert cpu_shares.share_of(0) == cpu_shares.FULL_SHARE
    assert [cpu_shares.engine_share(number, 16) for number in (0, 1, 16, 17, 100)] == [cpu_shares.COMPUTE_SHARE] * 3 + [
        cpu_shares.FULL_SHARE
    ] * 2


def test_tenants_share_the_cpu_by_weight_and_not_by_number_of_sandboxes():
    for other in (1, 2, 5, 9):
        shares = cpu_shares.shares_by_tenant({1: "small"} | dict.fromkeys(range(2, other + 2), "large"), {})
        assert shares.pop(1) == cpu_shares.FULL_SHARE
        sum_of_weights = sum(1024 / 1.25**niceness for niceness in shares.values())
        assert sum_of_weights == pytest.approx(1024 / 1.25**cpu_shares.FULL_SHARE, rel=0.12), (
            "niceness is a whole number"
        )
    sandboxes = {1: "small", 2: "large", 3: "large", 4: "large"}
    assert set(cpu_shares.shares_by_tenant(sandboxes, {"large": 3.0}).values()) == {cpu_shares.FULL_SHARE}
    assert cpu_shares.shares_by_tenant(sandboxes, {"small": 3.0}) == {1: cpu_shares.FULL_SHARE, 2: 10, 3: 10, 4: 10}
