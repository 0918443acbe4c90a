"""NetworkPolicies that deny all traffic except the listed one.

Another policy can only allow more; RBAC decides who may write policies.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from urllib.parse import urlsplit

from marlaas_api.messages.job_spec import EgressRule
from marlaas_operator.address_ranges import Block, opened, part
from marlaas_operator.installation import Destinations, Installation
from marlaas_operator.manifests.pods import Part

_NATS_PORT = 4222


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


def to_store(installation: Installation) -> list[Part]:
    """Return the rule for the object store; none if the blobs are on a volume."""
    return [] if installation.blobs.claim_name else _to_service(installation.network.store, installation)


def to_hub(installation: Installation) -> list[Part]:
    """Return the rule for the model hub."""
    return _to_service(installation.network.hub, installation)


def to_destinations(egress: Iterable[EgressRule], installation: Installation) -> list[Part]:
    """Return the rules for the destinations of a job's environment, as far as the installation opens them to jobs."""
    blocks = _blocks(installation.network.job_egress, installation.network.closed_ranges)
    return [
        {"to": peers, **({"ports": _tcp(destination.ports)} if destination.ports else {})}
        for destination in egress
        if (peers := [_peer(one) for block in blocks if (one := part(block, destination.cidr))])
    ]


def closed_destinations(cidrs: Iterable[str], installation: Installation) -> tuple[str, ...]:
    """Return the ranges of which the installation opens nothing to jobs."""
    blocks = _blocks(installation.network.job_egress, installation.network.closed_ranges)
    return tuple(cidr for cidr in cidrs if not any(part(block, cidr) for block in blocks))


@cache
def _blocks(ranges: tuple[str, ...], closed: tuple[str, ...]) -> tuple[Block, ...]:
    """Parse the installation's ranges once, not for every job."""
    return tuple(opened(ranges, closed))


def _to_service(service: Destinations, installation: Installation) -> list[Part]:
    peers = list(map(_peer, _blocks(service.ranges, installation.network.closed_ranges)))
    return [{"to": peers, "ports": _tcp(service.ports)}] if peers else []


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


def _peer(block: Block) -> Part:
    holes = [str(hole) for hole in block.holes]
    return {"ipBlock": {"cidr": str(block.network), **({"except": holes} if holes else {})}}


def _tcp(ports: Iterable[int]) -> list[Part]:
    return [_port("TCP", port) for port in ports]


def _port(protocol: str, port: int) -> Part:
    return {"protocol": protocol, "port": port}
