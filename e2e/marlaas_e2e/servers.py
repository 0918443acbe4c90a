"""Command lines of etcd, kube-apiserver and kube-controller-manager: the same for a control plane alone and for a node."""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from marlaas_e2e import binaries
from marlaas_e2e.certificates import Authority, KeyPair

SERVICE_RANGE = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
_DNS_NAMES = (
    "localhost",
    *(f"kubernetes{end}" for end in ("", ".default", ".default.svc", ".default.svc.cluster.local")),
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
        return self.kubeconfig_with(self.authority.client(user, groups))

    def kubeconfig_with(self, client: KeyPair) -> Path:
        target = self.folder / f"{client.certificate.stem}.kubeconfig"
        return _write_kubeconfig(target, self.addresses.api_url, self.authority.own.certificate, client)

    def etcd(self) -> list[str | Path]:
        return self._command("etcd", data=self.folder / "etcd", **self._etcd_urls)

    def api_server(self) -> list[str | Path]:
        node = self.addresses.node
        names = (*_DNS_NAMES, "127.0.0.1", API_SERVICE, *([node] if node else []))
        serving = self.authority.server("kube-apiserver", names)
        kubelet_client = self.authority.client("kube-apiserver-kubelet-client", ["system:masters"])
        listen = ["--bind-address=0.0.0.0", f"--advertise-address={node}"] if node else _LOOPBACK
        files = {
            **{"authority": self.authority.own.certificate, "certificate": serving.certificate, "key": serving.key},
            **{"accounts": self._accounts.certificate, "accounts_key": self._accounts.key},
            **{"kubelet_certificate": kubelet_client.certificate, "kubelet_key": kubelet_client.key},
        }
        words = self._command(
            "kube-apiserver", port=self.addresses.api_port, services=SERVICE_RANGE, **files, **self._etcd_urls
        )
        return [*words, *listen]

    @property
    def _etcd_urls(self) -> dict[str, str]:
        ports = {"clients": self.addresses.etcd_port, "peers": self.addresses.etcd_peer_port}
        return {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}

    def controller_manager(self, port: int) -> list[str | Path]:
        own = self.authority.own
        return self._controller(
            "kube-controller-manager", port, authority=own.certificate, key=own.key, accounts=self._accounts.key
        )

    def scheduler(self, port: int) -> list[str | Path]:
        return self._controller("kube-scheduler", port)

    def _controller(self, name: str, port: int, **words: Path) -> list[str | Path]:
        return self._command(name, port=port, kubeconfig=self.kubeconfig(f"system:{name}"), **words)

    def _command(self, name: str, **words: str | int | Path) -> list[str | Path]:
        """A program with the flags of its file in `flags/`, filled in."""
        text = Template((_FLAGS / name).read_text()).substitute(words)
        return [binaries.path(name), *(line for line in text.splitlines() if not line.startswith("#"))]


_FLAGS = Path(__file__).with_name("flags")
_LOOPBACK = ["--bind-address=127.0.0.1", "--endpoint-reconciler-type=none"]


def _write_kubeconfig(target: Path, url: str, authority: Path, client: KeyPair) -> Path:
    """As JSON, which is YAML. One context `e2e` for the server at `url`; certificates are embedded, so the file can be copied anywhere."""
    user = {"client-certificate-data": _encoded(client.certificate), "client-key-data": _encoded(client.key)}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "e2e", "cluster": {"server": url, "certificate-authority-data": _encoded(authority)}}],
        "users": [{"name": "e2e", "user": user}],
        "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "e2e"}}],
        "current-context": "e2e",
    }
    target.write_text(json.dumps(content, indent=1))
    target.chmod(0o600)
    return target


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
