"""Bringing the node up and taking it down, from outside its namespaces.

One cluster per user's cache. `up` leaves it running in the background; a cluster that is `tied` dies with the
process that brought it up, however that ends.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from marlaas_e2e import binaries, images
from marlaas_e2e.cache import file_lock
from marlaas_e2e.kubectl import run
from marlaas_e2e.node import host
from marlaas_e2e.node.layout import Layout
from marlaas_e2e.node.store import ImageStore
from marlaas_e2e.packages import missing_packages
from marlaas_e2e.processes import NotReady

_UP_TIMEOUT_S = 240.0
_DOWN_TIMEOUT_S = 30.0
_MANIFESTS = Path(__file__).with_name("manifests.yaml")
_NAMESPACES = ("--net", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc", "--propagation=private")


class CannotRun(Exception):
    """This machine cannot hold a node; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Running:
    """The processes of a cluster that runs: `unshare` and process 1 of its namespaces."""

    unshare: int
    init: int


def running(layout: Layout) -> Running | None:
    """The cluster of this layout, if it lives."""
    record = layout.run / "processes.json"
    if not record.exists():
        return None
    found = json.loads(record.read_text())
    alive = all(host.birth_of(found[name]) == found[f"{name}_birth"] for name in ("unshare", "init"))
    return Running(found["unshare"], found["init"]) if alive else None


def up(layout: Layout, *, tied: bool = False) -> Running:
    """Bring the cluster up, or find it running. Raises CannotRun, CannotBuild, NotReady (with a log's last words)."""
    check_machine()
    with file_lock(layout.root / "lock"):
        if (found := running(layout)) is not None:
            return found
        binaries.ensure()
        archives = [images.pause_archive(), images.dns_archive()]
        _clear(layout)
        host.save_settings(layout.root)
        host.make_cgroups(layout.cgroup)
        try:
            found = _start(layout, tied)
            for archive in archives:
                ImageStore(layout).bring(archive)
            _install_names(layout, found)
        except BaseException:
            _end(layout)  # its logs stay until the next one
            raise
        return found


def down(layout: Layout) -> None:
    """End it and put the machine's settings back; the image store stays. Nothing if none runs."""
    with file_lock(layout.root / "lock"):
        _kill(layout)


@contextmanager
def cluster(layout: Layout) -> Iterator[Running]:
    """A tied cluster for the length of a block; one that runs already is used and left running."""
    if (found := running(layout)) is not None:
        yield found
        return
    try:
        yield up(layout, tied=True)
    finally:
        down(layout)


def inside(found: Running, command: Sequence[str | Path]) -> list[str]:
    """The command as it must be started to be in the cluster's network (files and processes stay the caller's)."""
    return ["nsenter", f"--target={found.init}", "--net", "--", *map(str, command)]


def kubectl(layout: Layout, found: Running, *arguments: str | Path, stdin: str | None = None) -> str:
    """As administrator; raises CommandFailed."""
    command = [binaries.path("kubectl"), "--kubeconfig", layout.kubeconfig, *arguments]
    return run(inside(found, command), stdin)


def check_machine() -> None:
    """Raises CannotRun, saying what is missing."""
    check_rights()
    if missing := missing_packages():
        raise CannotRun(f"Not installed: {', '.join(missing)} (make e2e-packages)")


def check_rights() -> None:
    """What no package mends. Raises CannotRun."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise CannotRun("A node needs Linux and root")
    if subprocess.run(["unshare", *_NAMESPACES, "true"], capture_output=True).returncode != 0:
        raise CannotRun("unshare is refused here: new network, mount and process namespaces are needed")


def _start(layout: Layout, tied: bool) -> Running:
    log = (layout.run / "init.log").open("ab")
    command = ["unshare", *_NAMESPACES, sys.executable, "-m", "marlaas_e2e.node.init", str(layout.root)]
    tie = ["setpriv", "--pdeathsig", "KILL", "--"] if tied else []
    with log:
        process = subprocess.Popen(
            [*tie, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        return _started(layout, process)
    except BaseException:
        process.kill()  # and by --kill-child everything in it
        process.wait()
        raise


def _started(layout: Layout, process: subprocess.Popen[bytes]) -> Running:
    deadline = time.monotonic() + _UP_TIMEOUT_S
    found: Running | None = None
    while found is None or not layout.ready.exists():
        found = found or _record(layout, process.pid)
        if layout.failed.exists() or process.poll() is not None or time.monotonic() > deadline:
            raise NotReady(f"The node did not start: {_reason(layout)}")
        time.sleep(0.05)
    return found


def _record(layout: Layout, unshare: int) -> Running | None:
    """Write the processes down as soon as process 1 is there."""
    init = host.child_of(unshare)
    if init is None:
        return None
    births = {"unshare_birth": host.birth_of(unshare), "init_birth": host.birth_of(init)}
    (layout.run / "processes.json").write_text(json.dumps({"unshare": unshare, "init": init, **births}))
    return Running(unshare, init)


def _reason(layout: Layout) -> str:
    for source in (layout.failed, layout.run / "init.log"):
        if source.exists() and (text := source.read_text().strip()):
            return "\n".join(text.splitlines()[-20:])
    return "no word from it"


def _install_names(layout: Layout, found: Running) -> None:
    kubectl(layout, found, "apply", "-f", _MANIFESTS)
    kubectl(layout, found, "-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=90s")


def _kill(layout: Layout) -> None:
    _end(layout)
    _clear(layout)


def _end(layout: Layout) -> None:
    found = running(layout)
    if found is not None:
        for pid in (found.init, found.unshare):
            host.kill(pid)
        _until(lambda: host.gone(found.init) and host.gone(found.unshare), "the cluster's processes do not end")
    host.remove_cgroups(layout.cgroup)
    host.restore_settings(layout.root)


def _clear(layout: Layout) -> None:
    """Delete the run folder; never through something mounted in it."""
    host.refuse_mounts_under(layout.run)
    if layout.run.exists():
        shutil.rmtree(layout.run)
    layout.run.mkdir(parents=True)
    layout.store.mkdir(exist_ok=True)


def _until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + _DOWN_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise NotReady(otherwise)
        time.sleep(0.02)
