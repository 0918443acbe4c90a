"""The command lines of everything that runs on the node, in the order of their start."""

import sys
from pathlib import Path

from marlaas_e2e import binaries
from marlaas_e2e.api import ApiClient
from marlaas_e2e.node.layout import API_PORT, ETCD_PEER_PORT, ETCD_PORT, NODE, NODE_ADDRESS, Layout, write_configuration
from marlaas_e2e.processes import Daemon
from marlaas_e2e.servers import Addresses, Servers


class NodeServers:
    """Writes the configuration of one node into its run folder, and makes its daemons (none started yet)."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.control = Servers(layout.run, Addresses(API_PORT, ETCD_PORT, ETCD_PEER_PORT, NODE_ADDRESS))
        self._write_configuration()

    def containerd(self) -> Daemon:
        return self._daemon("containerd", "containerd", "-c", self.layout.run / "containerd.toml")

    def etcd(self) -> Daemon:
        return self._daemon("etcd", *self.control.etcd())

    def api_server(self) -> Daemon:
        return self._daemon("kube-apiserver", *self.control.api_server())

    def controllers(self) -> list[Daemon]:
        """Only once the API server is ready: before, they end for good."""
        return [
            self._daemon("kube-controller-manager", *self.control.controller_manager(10257)),
            self._daemon("kube-scheduler", *self.control.scheduler(10259)),
            self._daemon("agent", sys.executable, "-m", "marlaas_e2e.node.agent", self.layout.root),
        ]

    def workers(self) -> list[Daemon]:
        """The kubelet and kube-proxy."""
        run = self.layout.run
        kubelet = (
            binaries.path("kubelet"),
            f"--config={run}/kubelet.yaml",
            f"--kubeconfig={self.control.kubeconfig_with(self._kubelet)}",
            f"--hostname-override={NODE}",
            f"--node-ip={NODE_ADDRESS}",
            f"--root-dir={run}/kubelet",
            f"--cert-dir={run}/kubelet-pki",
        )
        proxy = (binaries.path("kube-proxy"), f"--config={run}/kube-proxy.yaml", f"--hostname-override={NODE}")
        return [self._daemon("kubelet", *kubelet), self._daemon("kube-proxy", *proxy)]

    def _write_configuration(self) -> None:
        run = self.layout.run
        for folder in ("volumes", "volplugins", "podlogs"):
            (run / folder).mkdir(parents=True, exist_ok=True)
        self._kubelet = self.control.authority.client(f"system:node:{NODE}", ["system:nodes"], [NODE_ADDRESS])
        self.control.kubeconfig("admin", ["system:masters"])
        pair = {"certificate": self._kubelet.certificate, "key": self._kubelet.key}
        write_configuration(self.layout, **pair, proxy_kubeconfig=self.control.kubeconfig("system:kube-proxy"))
        (run / "resolv.conf").write_text("")  # pods inherit nothing of the machine's

    def _daemon(self, name: str, *command: str | Path) -> Daemon:
        return Daemon(name, command, self.layout.run / f"{name}.log")


def api_client(layout: Layout) -> ApiClient:
    """The administrator's, from inside the cluster's network namespace."""
    control = Servers(layout.run, Addresses(API_PORT, ETCD_PORT, ETCD_PEER_PORT, NODE_ADDRESS))
    admin = control.authority.client("admin", ["system:masters"])
    return ApiClient(control.addresses.api_url, str(control.authority.own.certificate), admin)
