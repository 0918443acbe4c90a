"""Command lines of etcd, kube-apiserver and kube-controller-manager: the same for a control plane alone and for a node."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from marlaas_e2e import binaries
from marlaas_e2e.certificates import Authority, KeyPair
from marlaas_e2e.kubeconfig import write_kubeconfig

SERVICE_RANGE = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
_DNS_NAMES = (
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the servers listen. `node` is the address that pods reach the API server at; None without a node."""

    api_port: int
    etcd_port: int
    etcd_peer_port: int
    node: str | None = None

    @property
    def api_url(self) -> str:
        return f"https://127.0.0.1:{self.api_port}"


class Servers:
    """Certificates, kubeconfigs and command lines of one control plane in one folder."""

    def __init__(self, folder: Path, addresses: Addresses) -> None:
        self.folder = folder
        self.addresses = addresses
        self.authority = Authority(folder / "pki")
        self._accounts = self.authority.signing_key("sa")

    def kubeconfig(self, user: str, groups: Sequence[str] = ()) -> Path:
        """A kubeconfig of any user; the file is named after user and groups."""
        return self.kubeconfig_with(self.authority.client(user, groups))

    def kubeconfig_with(self, client: KeyPair) -> Path:
        target = self.folder / f"{client.certificate.stem}.kubeconfig"
        return write_kubeconfig(target, self.addresses.api_url, self.authority.own.certificate, client)

    def etcd(self) -> list[str | Path]:
        """Without fsync: nothing here outlives the machine."""
        clients, peers = (
            f"http://127.0.0.1:{port}" for port in (self.addresses.etcd_port, self.addresses.etcd_peer_port)
        )
        return [
            binaries.path("etcd"),
            f"--data-dir={self.folder}/etcd",
            "--unsafe-no-fsync",
            f"--listen-client-urls={clients}",
            f"--advertise-client-urls={clients}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
            "--log-level=warn",
        ]

    def api_server(self) -> list[str | Path]:
        """All default admission (PodSecurity, ValidatingAdmissionPolicy) plus NodeRestriction; RBAC on."""
        node = self.addresses.node
        names = (*_DNS_NAMES, "127.0.0.1", API_SERVICE, *([node] if node else []))
        serving = self.authority.server("kube-apiserver", names)
        kubelet_client = self.authority.client("kube-apiserver-kubelet-client", ["system:masters"])
        listen = ["--bind-address=0.0.0.0", f"--advertise-address={node}"] if node else _LOOPBACK
        return [
            binaries.path("kube-apiserver"),
            *listen,
            f"--secure-port={self.addresses.api_port}",
            f"--etcd-servers=http://127.0.0.1:{self.addresses.etcd_port}",
            f"--tls-cert-file={serving.certificate}",
            f"--tls-private-key-file={serving.key}",
            f"--client-ca-file={self.authority.own.certificate}",
            f"--service-account-key-file={self._accounts.certificate}",
            f"--service-account-signing-key-file={self._accounts.key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            f"--kubelet-client-certificate={kubelet_client.certificate}",
            f"--kubelet-client-key={kubelet_client.key}",
            "--kubelet-preferred-address-types=InternalIP",
            "--allow-privileged",
            f"--requestheader-client-ca-file={self.authority.own.certificate}",
            "--requestheader-allowed-names=front-proxy",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        ]

    def controller_manager(self, port: int) -> list[str | Path]:
        own = self.authority.own
        return [
            *self._controller("kube-controller-manager", port),
            f"--service-account-private-key-file={self._accounts.key}",
            f"--root-ca-file={own.certificate}",
            "--use-service-account-credentials",
            f"--cluster-signing-cert-file={own.certificate}",
            f"--cluster-signing-key-file={own.key}",
        ]

    def scheduler(self, port: int) -> list[str | Path]:
        return self._controller("kube-scheduler", port)

    def _controller(self, name: str, port: int) -> list[str | Path]:
        """Faster than the default 20 requests a second, at which the first service account takes six seconds."""
        kubeconfig = self.kubeconfig(f"system:{name}")
        return [
            binaries.path(name),
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            "--kube-api-qps=300",
            "--kube-api-burst=500",
        ]


_LOOPBACK = ["--bind-address=127.0.0.1", "--endpoint-reconciler-type=none"]
