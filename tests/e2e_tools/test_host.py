"""What is found out about this machine's processes."""

import pytest

from marlaas_e2e.node import host


def test_a_container_whose_children_come_and_go_is_still_killed_at_its_first_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    births: dict[int, list[str | None]] = {1: ["5"], 20: ["100"], 21: ["101", None], 22: [None], 30: ["90"]}
    monkeypatch.setattr(host, "_all_pids", lambda: list(births))
    monkeypatch.setattr(host, "_in_cgroup", lambda pid, wanted: pid > 1 and wanted == "abc")
    monkeypatch.setattr(host, "birth_of", lambda pid: births[pid].pop(0))
    assert host.container_pid("containerd://abc") == 30
    assert host.container_pid("containerd://gone") is None
