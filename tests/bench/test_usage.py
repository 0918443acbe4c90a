"""What `bench` reads of a run's processes."""

import subprocess
import sys
from pathlib import Path

from bench.usage import UsageRecorder


def test_processes_are_counted_by_role(tmp_path: Path):
    """A runner with one child that looks like a role, and a grandchild of the same role."""
    child = "import subprocess, sys; subprocess.run(['cat'])"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}, 'marlaas_worker', 'trainer'])"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as runner:
        recorder = UsageRecorder(runner.pid, tmp_path / "usage.jsonl", tmp_path)
        while "trainer" not in (sample := recorder._sample(with_memory=True))["cpu_s"]:
            pass
        assert runner.stdin is not None
        runner.stdin.close()
    assert sample["cpu_s"].keys() == {"runner", "trainer"}
    assert all(sample[what]["trainer"] > 0 for what in ("pss_bytes", "files", "threads"))
    assert "streams" not in sample
