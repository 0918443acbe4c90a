"""Where no node can run, the scenarios are skipped by name; every other trouble is an error."""

import os

import pytest

from marlaas_e2e.__main__ import UNABLE, main


def test_without_root_it_says_so_and_how_it_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("E2E_CONTEXT", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["able"]) == UNABLE
    assert "root" in capsys.readouterr().out


def test_somebody_elses_cluster_needs_no_rights_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2E_CONTEXT", "kind-kind")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["able"]) == 0
