"""What children of a sandbox cannot read, tried in a process of its own: there is no way back."""

import subprocess
import sys
from pathlib import Path

import pytest

from marlaas_worker.sandbox.seclusion import secluded

PROGRAM = """
import os, sys
from pathlib import Path
from marlaas_worker.sandbox.seclusion import seclude
folder = Path(sys.argv[1])
if not seclude(Path(sys.argv[2])):
    sys.exit(77)
def can(path):
    try:
        Path(path).read_bytes()
        return True
    except PermissionError:
        return False
print([can(folder / "bus" / "bus.creds"), can(folder / "link"), can(folder / "beside"), can("/etc/passwd"), can("/proc/self/status")])
try:
    os.open(f"/proc/{os.getppid()}/fd/0", os.O_RDONLY)
    print("looked")
except PermissionError:
    print("hidden")
folder /= "work"; (folder / "one").mkdir(); (folder / "two").mkdir()
(folder / "one" / "x").write_text("x"); (folder / "one" / "x").rename(folder / "two" / "x")
print((folder / "two" / "x").read_text())
"""


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A Secret as it is mounted: a link to a link to what comes and goes."""
    folder = tmp_path / "bus"
    (folder / "..2026").mkdir(parents=True)
    (folder / "..2026" / "bus.creds").write_text("seed")
    (folder / "..data").symlink_to("..2026")
    (folder / "bus.creds").symlink_to("..data/bus.creds")
    (tmp_path / "link").symlink_to(folder / "bus.creds")
    (tmp_path / "beside").write_text("beside")
    (tmp_path / "work").mkdir()
    return folder / "bus.creds"


def test_the_folder_of_a_mounted_secret_the_file_of_a_person_and_nothing_of_a_descriptor(secret, tmp_path):
    assert secluded(secret) == tmp_path / "bus"
    assert secluded(tmp_path / "beside") == tmp_path / "beside"
    assert secluded(Path("/dev/fd/7")) is None


@pytest.mark.parametrize("mounted", [True, False])
def test_children_read_all_but_the_credential_and_look_into_no_process_outside(secret, tmp_path, mounted):
    if not mounted:
        secret.unlink()
        secret.write_text("seed")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(secluded(secret))],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("this kernel has no Landlock of version 2 or newer")
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["[False, False, True, True, True]", "hidden", "x"]
