"""Addresses, folders and configuration files of the node: values and text, nothing runs here."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from marlaas_e2e.cache import cache_dir
from marlaas_e2e.certificates import KeyPair
from marlaas_e2e.images import PAUSE
from marlaas_e2e.packages import CNI_PLUGINS

NODE = "node1"
NODE_ADDRESS = "172.30.0.2"
POD_RANGE = "10.244.0.0/24"
DNS_SERVICE = "10.96.0.10"
OUTSIDE_ADDRESS = "198.51.100.10"  # RFC 5737: stands for the internet
METADATA_ADDRESS = (
    "169.254.169.254"  # what clouds answer credentials at; served here, so that a test can see it blocked
)
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


def containerd_config(layout: Layout) -> str:
    """`restrict_oom_score_adj`: root in a container may lack the right to lower it, and then no sandbox starts."""
    return f"""
version = 2
root = '{layout.store}'
state = '{layout.run}/containerd-state'
[grpc]
  address = '{layout.containerd_socket}'
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PLUGINS}"
    conf_dir = "{layout.run}/cni"
"""


def cni_config(layout: Layout) -> str:
    """A bridge and host ports; no masquerading, since nothing leaves the namespace."""
    addresses = {"type": "host-local", "ranges": [[{"subnet": POD_RANGE}]], "dataDir": f"{layout.run}/cni-ipam"}
    bridge = {"type": "bridge", "bridge": "cni0", "isDefaultGateway": True, "hairpinMode": True, "ipam": addresses}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return json.dumps({"cniVersion": "0.4.0", "name": "e2e", "plugins": [bridge, ports]})


def kubelet_config(layout: Layout, identity: KeyPair) -> str:
    """`failCgroupV1: false`: this kind of machine still has the first control groups."""
    pki, run = layout.run / "pki", layout.run
    content = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{layout.containerd_socket}",
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{layout.cgroup}",
        "failSwapOn": False,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(identity.certificate),
        "tlsPrivateKeyFile": str(identity.key),
        "clusterDomain": "cluster.local",
        "clusterDNS": [DNS_SERVICE],
        "resolvConf": f"{run}/resolv.conf",
        "podLogsDir": f"{run}/podlogs",
        "volumePluginDir": f"{run}/volplugins",
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1Gi",
            "imagefs.available": "1Gi",
            "nodefs.inodesFree": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "nodeStatusUpdateFrequency": "2s",
        "syncFrequency": "10s",
        "kubeAPIQPS": 100,
        "kubeAPIBurst": 200,
        "serializeImagePulls": False,
        "podPidsLimit": 4096,
    }
    return json.dumps(content, indent=1)


def kube_proxy_config(kubeconfig: Path) -> str:
    """Connection tracking's limits belong to the machine: with 0 they are not written."""
    content = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "clusterCIDR": POD_RANGE,
        "detectLocalMode": "ClusterCIDR",
        "bindAddress": "127.0.0.1",
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    return json.dumps(content, indent=1)
