"""What vLLM's processes are told of the machine that they start on."""

from pathlib import Path

import pytest

from marlaas_worker.rollout.vllm_settings import has_compiler


def test_a_compiler_is_looked_for_where_torch_would_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert not has_compiler()
    (tmp_path / "clang++").touch(mode=0o755)
    monkeypatch.setenv("CXX", "clang++")
    assert has_compiler()
