"""Share of the CPU of environments beside the engine and the trainer of the same machine."""

import logging
from pathlib import Path

import pytest
from tests.sandbox.conftest import SandboxHarness

from marlaas_worker.sandbox import kernel, server_start

has_autogroups = pytest.mark.skipif(
    not Path("/proc/self/autogroup").exists(),
    reason="this kernel has no CPU shares of sessions (CONFIG_SCHED_AUTOGROUP)",
)


@pytest.fixture(autouse=True)
def _own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_start, "_LOCK", tmp_path / "loading.lock")


@has_autogroups
async def test_an_environment_has_a_lower_share_as_a_session_and_as_a_process(harness: SandboxHarness) -> None:
    (episode,) = await harness.play("shares:share")
    assert episode.metrics == {"session": kernel.SHARE_NICENESS, "process": kernel.SHARE_NICENESS}


@has_autogroups
async def test_an_environment_that_begins_a_session_gets_no_full_share(harness: SandboxHarness) -> None:
    (episode,) = await harness.play("shares:escapes")
    assert episode.metrics == {"fresh": 0.0, "later": kernel.SHARE_NICENESS}


@has_autogroups
async def test_one_environment_at_a_time_is_loaded_with_a_full_share(harness: SandboxHarness) -> None:
    (episode,) = await harness.play("shares:Loads")
    assert episode.metrics == {"first": 0.0, "last": 0.0}


@has_autogroups
async def test_an_environment_that_is_loaded_beside_another_has_a_low_share(harness: SandboxHarness) -> None:
    with server_start.loads_alone():
        (episode,) = await harness.play("shares:Loads")
    assert episode.metrics == {"first": kernel.SHARE_NICENESS, "last": kernel.SHARE_NICENESS}


@has_autogroups
async def test_a_full_share_ends_although_the_environment_is_still_loading(
    harness: SandboxHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_start, "FULL_SHARE_S", 1.0)
    (episode,) = await harness.play("shares:Loads", args={"until_low": True})
    assert episode.metrics == {"first": 0.0, "last": kernel.SHARE_NICENESS}


def test_one_process_at_a_time_loads_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with server_start.loads_alone() as first, server_start.loads_alone() as second:
        assert (first, second) == (True, False)
    with server_start.loads_alone() as later:
        assert later
    monkeypatch.setattr(server_start, "_LOCK", tmp_path / "missing" / "lock")
    with server_start.loads_alone() as without:
        assert not without


async def test_a_kernel_without_shares_is_noted_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel, "_AUTOGROUP", str(tmp_path / "{}-missing"))
    monkeypatch.setattr(server_start, "_RETRY_S", 0.0)
    with caplog.at_level(logging.INFO):
        await server_start._lower_share(1)
    assert "niceness alone applies" in caplog.text


def test_a_share_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_AUTOGROUP", str(tmp_path / "autogroup-{}"))
    (tmp_path / "autogroup-7").write_text("/autogroup-12 nice 0\n")
    assert kernel.lower_share(7)
    written = (tmp_path / "autogroup-7").read_text()
    assert written.startswith(f"{kernel.SHARE_NICENESS}")
    (tmp_path / "autogroup-7").write_text(f"/autogroup-12 nice {kernel.SHARE_NICENESS}\n")
    assert kernel.lower_share(7)
    assert (tmp_path / "autogroup-7").read_text() == f"/autogroup-12 nice {kernel.SHARE_NICENESS}\n"
