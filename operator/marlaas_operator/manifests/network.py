"""NetworkPolicies: deny all but what is named. A policy of somebody else can only add to them; who may write policies is RBAC's business."""

import ipaddress
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from marlaas_api.kinds import Egress
from marlaas_operator.installation import Installation
from marlaas_operator.manifests.pods import Part

_LINK_LOCAL = {4: ipaddress.ip_network("169.254.0.0/16"), 6: ipaddress.ip_network("fe80::/10")}
"""Where clouds answer with a machine's own credentials; never opened."""
_NATS_PORT = 4222


def isolation(pods: Mapping[str, str], egress: Iterable[Part], ingress: Iterable[Part] = ()) -> Part:
    """Spec of a policy by which these pods take and make the connections of `ingress` and `egress` only."""
    return {
        "podSelector": {"matchLabels": dict(pods)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": list(ingress),
        "egress": list(egress),
    }


def from_metrics_readers(installation: Installation, port: int) -> list[Part]:
    """Who may read the figures at a port; nobody unless the chart names them."""
    if not installation.metrics_from:
        return []
    return [{"from": list(installation.metrics_from), "ports": [_port("TCP", port)]}]


def to_platform(installation: Installation) -> list[Part]:
    """Names and the bus: what every pod of ours needs."""
    return [_to_dns(installation), *_to_bus(installation)]


def to_https() -> Part:
    """Model hub and object store, wherever they are."""
    blocks = [_block("0.0.0.0/0"), _block("::/0")]
    return {"to": blocks, "ports": [_port("TCP", 443)]}


def to_destinations(egress: Iterable[Egress]) -> list[Part]:
    """What a job's environment may reach."""
    return [rule for destination in egress for rule in _to_destination(destination)]


def _to_destination(destination: Egress) -> list[Part]:
    network = ipaddress.ip_network(destination.cidr, strict=False)
    if network.version == 4 and network.subnet_of(ipaddress.IPv4Network(_LINK_LOCAL[4])):
        return []
    if network.version == 6 and network.subnet_of(ipaddress.IPv6Network(_LINK_LOCAL[6])):
        return []
    ports = [_port("TCP", port) for port in destination.ports]
    return [{"to": [_block(str(network))], **({"ports": ports} if ports else {})}]


def _to_dns(installation: Installation) -> Part:
    pods = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}
    servers = [{"ipBlock": {"cidr": cidr}} for cidr in installation.dns_cidrs]
    return {"to": [pods, *servers], "ports": [_port("UDP", 53), _port("TCP", 53)]}


def _to_bus(installation: Installation) -> list[Part]:
    to: list[Part] = [{"ipBlock": {"cidr": cidr}} for cidr in installation.nats_cidrs]
    if installation.nats_pod_selector is not None:
        namespace = {"matchLabels": {"kubernetes.io/metadata.name": installation.namespace}}
        to.append({"namespaceSelector": namespace, "podSelector": {"matchLabels": installation.nats_pod_selector}})
    port = urlsplit(installation.nats_url).port or _NATS_PORT
    return [{"to": to, "ports": [_port("TCP", port)]}] if to else []


def _block(cidr: str) -> Part:
    """An address range without the link-local one that it may hold."""
    network = ipaddress.ip_network(cidr)
    hole = _LINK_LOCAL[network.version]
    held = network.prefixlen <= hole.prefixlen and network.overlaps(hole)
    return {"ipBlock": {"cidr": cidr, **({"except": [str(hole)]} if held else {})}}


def _port(protocol: str, port: int) -> Part:
    return {"protocol": protocol, "port": port}
