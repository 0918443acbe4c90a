"""Addresses, folders and configuration files of the node; nothing runs here."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from string import Template

from marlaas_e2e.cache import cache_dir
from marlaas_e2e.images import PAUSE
from marlaas_e2e.packages import CNI_PLUGINS
from marlaas_e2e.servers import SERVICE_RANGE

NODE = "node1"
NODE_ADDRESS = "172.30.0.2"
POD_RANGE = "10.244.0.0/24"
DNS_SERVICE = "10.96.0.10"
_CONFIG = Path(__file__).with_name("config")
API_PORT, ETCD_PORT, ETCD_PEER_PORT = 6443, 2379, 2380


@dataclass(frozen=True, slots=True)
class Layout:
    """Where one cluster keeps what. `run` is deleted by `down`; the image store and the saved sysctls stay."""

    root: Path

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def store(self) -> Path:
        return self.root / "images"

    @property
    def containerd_socket(self) -> Path:
        return self.run / "containerd.sock"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's; its server address is reachable inside the cluster's network namespace only."""
        return self.run / "admin-system_masters.kubeconfig"

    @property
    def ready(self) -> Path:
        return self.run / "ready"

    @property
    def failed(self) -> Path:
        return self.run / "failed"

    @property
    def cgroup(self) -> str:
        """Name of the control group that holds all pods."""
        return f"marlaas-e2e-{hashlib.sha256(str(self.root).encode()).hexdigest()[:8]}"

    @property
    def volumes(self) -> Path:
        return self.run / "volumes"


def default_layout() -> Layout:
    """In the user's cache."""
    return Layout(cache_dir() / "cluster")


def write_configuration(layout: Layout, **words: str | Path) -> None:
    """Fill in the files of `config/` and write them into the run folder. words: paths that servers know."""
    known = {
        **{"run": layout.run, "store": layout.store, "socket": layout.containerd_socket, "cgroup": layout.cgroup},
        **{"node_address": NODE_ADDRESS, "services": SERVICE_RANGE},
        **{"pause": PAUSE, "plugins": CNI_PLUGINS, "pod_range": POD_RANGE, "dns_service": DNS_SERVICE},
    }
    for file in _CONFIG.iterdir():
        target = layout.run / ("cni" if file.suffix == ".conflist" else "") / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Template(file.read_text()).substitute(known, **words))
