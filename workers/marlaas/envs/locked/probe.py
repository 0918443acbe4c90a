"""Verify the restrictions on this machine before any policy program runs: a probe program tries forbidden operations."""

from pathlib import Path

from marlaas.envs.locked.program import Limits, NotLocked, run_program

_HOLDS = "the locks hold"
_PROBE = f"""
import ctypes, os, socket

def holds(attempt):
    try:
        attempt()
    except PermissionError:
        return True
    return False

parent = os.getppid()
attempts = dict(
    network=socket.socket,
    processes=os.fork,
    reading=lambda: open({str(Path(__file__).resolve())!r}),
    writing=lambda: open(os.getcwd() + "-outside", "w"),
    environment=lambda: open(f"/proc/{{parent}}/environ", "rb"),
    memory=lambda: open(f"/proc/{{parent}}/mem", "rb"),
    signals=lambda: os.kill(parent, 0),
)
broken = [name for name, attempt in attempts.items() if not holds(attempt)]
libc = ctypes.CDLL(None, use_errno=True)
PTRACE_SEIZE = 0x4206
if libc.ptrace(PTRACE_SEIZE, parent, 0, 0) != -1:
    broken.append("ptrace")
print("not locked: " + ", ".join(broken) if broken else {_HOLDS!r})
"""


def prove() -> None:
    """Run the probe. Raises NotLocked if an operation is not denied."""
    ran = run_program(_PROBE, Limits(cpu_s=10, wall_s=120))
    if ran.output.strip() != _HOLDS:
        said = (ran.stopped or ran.output).strip() or f"exit code {ran.exit_code}"
        raise NotLocked(f"programs of a policy cannot be locked up on this machine, so none is run: {said}")
