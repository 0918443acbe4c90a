"""NetworkPolicies that deny all traffic except the listed one.

Another policy can only allow more; RBAC decides who may write policies.
"""

import ipaddress
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from marlaas_api.kinds.environment import CLOSED_RANGES
from marlaas_api.messages.job_spec import EgressRule
from marlaas_operator.installation import Installation
from marlaas_operator.manifests.pods import Part

_NATS_PORT = 4222
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def isolation(pods: Mapping[str, str], egress: Iterable[Part], ingress: Iterable[Part] = ()) -> Part:
    """Return the spec of a policy that allows these pods only the given `ingress` and `egress`."""
    return {
        "podSelector": {"matchLabels": dict(pods)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": list(ingress),
        "egress": list(egress),
    }


def from_metrics_readers(installation: Installation, port: int) -> list[Part]:
    """Return the rule for peers that may scrape metrics at a port; none unless the chart lists them."""
    if not installation.metrics_from:
        return []
    return [{"from": list(installation.metrics_from), "ports": [_port("TCP", port)]}]


def to_platform(installation: Installation) -> list[Part]:
    """Return the rules for DNS and the bus, which every pod of ours needs."""
    return [_to_dns(installation), *_to_bus(installation)]


def to_https() -> Part:
    """Return the rule for model hub and object store: port 443 of any address outside `CLOSED_RANGES`."""
    blocks = [_block("0.0.0.0/0"), _block("::/0")]
    return {"to": blocks, "ports": [_port("TCP", 443)]}


def to_destinations(egress: Iterable[EgressRule]) -> list[Part]:
    """Return the rules for the destinations of a job's environment."""
    return [rule for destination in egress for rule in _to_destination(destination)]


def _to_destination(destination: EgressRule) -> list[Part]:
    network = ipaddress.ip_network(destination.cidr, strict=False)
    if any(_holds(closed, network) for closed in CLOSED_RANGES):
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
    """Return an address range, except the parts in `CLOSED_RANGES` (cloud metadata services)."""
    network = ipaddress.ip_network(cidr)
    holes = [str(closed) for closed in CLOSED_RANGES if _holds(network, closed)]
    return {"ipBlock": {"cidr": cidr, **({"except": holes} if holes else {})}}


def _holds(network: _Network, other: _Network) -> bool:
    return network.version == other.version and network.prefixlen <= other.prefixlen and network.overlaps(other)


def _port(protocol: str, port: int) -> Part:
    return {"protocol": protocol, "port": port}
