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


@has_autogroups
async def test_an_environment_has_a_lower_share_as_a_session_and_as_a_process(harness: SandboxHarness) -> None:
    (episode,) = await harness.play("shares:share")
    assert episode.metrics == {"session": kernel.SHARE_NICENESS, "process": kernel.SHARE_NICENESS}


@has_autogroups
async def test_an_environment_that_begins_a_session_gets_no_full_share(harness: SandboxHarness) -> None:
    (episode,) = await harness.play("shares:escapes")
    assert episode.metrics == {"fresh": 0.0, "later": kernel.SHARE_NICENESS}


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
