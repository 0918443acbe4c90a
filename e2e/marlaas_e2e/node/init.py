"""Process 1 of the cluster's namespaces: mounts, links, daemons in order; then it reaps what is left to it.

Writes `ready` into the run folder when pods can be created, or `failed` with the reason. Killing it ends everything.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from marlaas_e2e.api import ApiError
from marlaas_e2e.node.layout import NODE, Layout
from marlaas_e2e.node.servers import NodeServers, api_client
from marlaas_e2e.node.store import ImageStore
from marlaas_e2e.processes import Daemon

_READY_TIMEOUT_S = 180.0
_PRIVATE = ("/run", "/var/lib/cni", "/var/log")  # else sockets and results of finished pods pile up on the machine
_OUTSIDE = "outside"


def main() -> None:
    """`python -m marlaas_e2e.node.init ROOT`, started by unshare."""
    layout = Layout(Path(sys.argv[1]))
    try:
        daemons = boot(layout)
    except BaseException as error:
        layout.failed.write_text(f"{type(error).__name__}: {error}")
        raise
    layout.ready.touch()
    supervise({daemon.pid: daemon for daemon in daemons})


def boot(layout: Layout) -> list[Daemon]:
    """Start everything; raises NotReady with the failing daemon's last words."""
    isolate_mounts()
    servers = NodeServers(layout)
    connect_links(layout)
    first = [servers.containerd(), servers.etcd(), servers.api_server(), outside_world(layout)]
    for daemon in first:
        daemon.start()
    client = api_client(layout)
    first[2].wait_ready(client.healthy, _READY_TIMEOUT_S)
    controllers = servers.controllers()
    for daemon in controllers:
        daemon.start()
    store = ImageStore(layout)
    first[0].wait_ready(store.answers, _READY_TIMEOUT_S)
    store.forget_containers()
    workers = servers.workers()
    for daemon in workers:
        daemon.start()
    workers[0].wait_ready(lambda: node_is_ready(layout), _READY_TIMEOUT_S)
    return [*first, *controllers, *workers]


def isolate_mounts() -> None:
    """Runtime folders of our own; shared propagation (the kubelet needs it) within this namespace only."""
    for folder in _PRIVATE:
        Path(folder).mkdir(parents=True, exist_ok=True)
        _do("mount", "-t", "tmpfs", "tmpfs", folder)
    _do("mount", "--make-rshared", "/")


def connect_links(layout: Layout) -> None:
    """The node's address, on one end of a veth pair; another pair leads to `outside`, a world of two addresses.

    There is no default route. The service range needs a route, or the node's own requests to services fail before
    they are translated.
    """
    _do("ip", "-batch", str(layout.run / "links.ip"))
    _do("ip", "-n", _OUTSIDE, "-batch", str(layout.run / "outside.ip"))
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def outside_world(layout: Layout) -> Daemon:
    """An HTTP server at port 80 of both outside addresses, so that blocked and unreachable are told apart."""
    folder = layout.run / "outside"
    folder.mkdir(exist_ok=True)
    (folder / "index.html").write_text("outside\n")
    server = (sys.executable, "-m", "http.server", "80", "--directory", folder)
    return Daemon("outside", ("ip", "netns", "exec", _OUTSIDE, *server), layout.run / "outside.log")


def node_is_ready(layout: Layout) -> bool:
    """Ready, and pods can be created (the default service account is there)."""
    client = api_client(layout)
    try:
        client.get("/api/v1/namespaces/default/serviceaccounts/default")
        conditions = client.get(f"/api/v1/nodes/{NODE}")["status"].get("conditions", [])
    except ApiError:
        return False
    finally:
        client.close()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def supervise(daemons: dict[int, Daemon]) -> None:
    """Reap for ever. A daemon that ends is written down, not restarted: a test should see it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        pid, status = os.wait()
        if (ended := daemons.get(pid)) is not None:
            code = os.waitstatus_to_exitcode(status)
            print(f"{ended.name} ended with {code}:\n{ended.last_words()}", file=sys.stderr, flush=True)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


if __name__ == "__main__":
    main()
