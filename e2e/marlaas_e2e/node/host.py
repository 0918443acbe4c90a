"""What a cluster touches of the machine outside its namespaces: processes, control groups and three settings."""

import contextlib
import json
import os
import signal
from pathlib import Path

_SETTINGS = ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops")  # the kubelet sets them, machine-wide


_CPU_WEIGHTS = {"cpu.shares": "4096", "cpu.weight": "400"}  # all pods together weigh as much as four processes, not one


def birth_of(pid: int) -> str | None:
    """Start time in clock ticks (with the id it names one process for ever); None if there is none, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def child_of(pid: int) -> int | None:
    """The first child process."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None


def kill(pid: int) -> None:
    """SIGKILL; nothing if it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def gone(pid: int) -> bool:
    """Whether it ended (a zombie that its parent has not reaped yet counts)."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return birth_of(pid) is None


def container_pid(container_id: str) -> int | None:
    """The machine's process id of a container's first process; `container_id` as in a pod's status."""
    wanted = container_id.rpartition("/")[2]
    births = {pid: born for pid in _all_pids() if _in_cgroup(pid, wanted) and (born := birth_of(pid)) is not None}
    return min(births, key=lambda pid: int(births[pid]), default=None)


def save_settings(folder: Path) -> None:
    """Remember the machine's settings, unless a cluster that was killed left them remembered."""
    record = folder / "sysctls.json"
    if not record.exists():
        record.write_text(json.dumps({name: (Path("/proc/sys") / name).read_text().strip() for name in _SETTINGS}))


def restore_settings(folder: Path) -> None:
    """Put back what `save_settings` remembered."""
    record = folder / "sysctls.json"
    if record.exists():
        for name, value in json.loads(record.read_text()).items():
            (Path("/proc/sys") / name).write_text(value)
        record.unlink()


def make_cgroups(name: str) -> None:
    """A control group of the cluster's own: two kubelets under one root would each kill the other's pods."""
    for hierarchy in _hierarchies():
        controllers = hierarchy / "cgroup.controllers"
        if controllers.exists():  # the second version hands controllers down only when told
            wanted = " ".join(f"+{each}" for each in controllers.read_text().split())
            (hierarchy / "cgroup.subtree_control").write_text(wanted)
        (hierarchy / name).mkdir(exist_ok=True)
        for file, weight in _CPU_WEIGHTS.items():
            if (hierarchy / name / file).exists():
                (hierarchy / name / file).write_text(weight)


def remove_cgroups(name: str) -> None:
    """The cluster's control groups, empty by now, in every hierarchy."""
    for top in (hierarchy / name for hierarchy in _hierarchies()):
        folders = [each for each in top.rglob("*") if each.is_dir()]
        for folder in (*sorted(folders, key=lambda each: -len(each.parts)), top):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _hierarchies() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        return [root]
    return [each for each in root.iterdir() if not each.is_symlink() and (each / "cgroup.procs").exists()]


def refuse_mounts_under(folder: Path) -> None:
    """Raises RuntimeError if something is mounted below `folder`."""
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    if found := [each for each in mounted if Path(each).is_relative_to(folder)]:
        raise RuntimeError(f"Mounted below {folder}, not deleting: {', '.join(found)}")


def _all_pids() -> list[int]:
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]


def _in_cgroup(pid: int, wanted: str) -> bool:
    try:
        return wanted in Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return False
