"""NetworkPolicy objects as an nftables script.

A test fixture: it enforces what the objects mean (selectors, address blocks, ports, both directions, isolation by
default), and is no network vendor's implementation. It knows IPv4 pods only, and no named ports, ranges of ports and
expressions, which no policy of ours has. Connections that exist when a policy comes are left alone, and a new pod is
open until the next pass (a fraction of a second).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

TABLE = "marlaas_e2e"
Direction = Literal["egress", "ingress"]
Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Peer:
    """The other side of a rule: an address block, or pods by their labels and their namespace's (None: the policy's own)."""

    block: str | None = None
    excepted: tuple[str, ...] = ()
    pods: Labels = field(default_factory=dict)
    namespaces: Labels | None = None


@dataclass(frozen=True, slots=True)
class Port:
    """A port by number, or every port of a protocol (number None)."""

    protocol: str = "TCP"
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """What is allowed: any of the peers (none given: everyone) on any of the ports (none given: all)."""

    peers: tuple[Peer, ...] = ()
    ports: tuple[Port, ...] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """One NetworkPolicy for the pods with some labels. A direction that it does not isolate has no rules."""

    namespace: str
    pods: Labels
    rules: Mapping[Direction, tuple[Rule, ...]]


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod with an address of its own."""

    namespace: str
    address: str
    labels: Labels = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Network:
    """All that policies speak of. `namespaces` maps a name to its labels."""

    pods: Sequence[Pod]
    namespaces: Mapping[str, Labels]
    policies: Sequence[Policy]

    def matching(self, peer: Peer, policy: Policy) -> list[Pod]:
        """The pods that a peer without an address block means."""
        return [pod for pod in self.pods if self._in_scope(pod, peer, policy) and _has(pod.labels, peer.pods)]

    def _in_scope(self, pod: Pod, peer: Peer, policy: Policy) -> bool:
        if peer.namespaces is None:
            return pod.namespace == policy.namespace
        return _has(self.namespaces.get(pod.namespace, {}), peer.namespaces)


def _has(labels: Labels, wanted: Labels) -> bool:
    return wanted.items() <= labels.items()


def nft_script(network: Network) -> str:
    """The whole table anew, in one transaction of `nft -f -`."""
    pods = sorted(network.pods, key=lambda pod: pod.address)
    chains = {
        (direction, pod.address): _chain(network, pod, direction)
        for direction in _DIRECTIONS
        for pod in pods
        if _isolating(network, pod, direction)
    }
    lines = [f"table inet {TABLE}", f"delete table inet {TABLE}", f"table inet {TABLE} {{"]
    for (direction, address), rules in chains.items():
        lines += _block(_name(direction, address), [*rules, "drop"])
    for direction in _DIRECTIONS:
        jumps = [f"ip {_OWN[direction]} {a} jump {_name(direction, a)}" for d, a in chains if d == direction]
        lines += _block(f"any_{direction}", jumps)
    lines += _block("forwarded", [_hook("forward"), _KNOWN, "jump any_egress", "jump any_ingress"])
    lines += _block("received", [_hook("input"), _KNOWN, "jump any_egress"])
    return "\n".join([*lines, "}"]) + "\n"


_DIRECTIONS: tuple[Direction, ...] = ("egress", "ingress")
_OWN: dict[Direction, str] = {"egress": "saddr", "ingress": "daddr"}
_OTHER: dict[Direction, str] = {"egress": "daddr", "ingress": "saddr"}
_KNOWN = "ct state established,related accept"


def _hook(name: str) -> str:
    return f"type filter hook {name} priority filter - 5; policy accept;"


def _name(direction: Direction, address: str) -> str:
    return f"{direction}_{address.replace('.', '_')}"


def _block(name: str, lines: Sequence[str]) -> list[str]:
    return [f"  chain {name} {{", *(f"    {line}" for line in lines), "  }"]


def _isolating(network: Network, pod: Pod, direction: Direction) -> list[Policy]:
    return [
        policy
        for policy in network.policies
        if policy.namespace == pod.namespace and direction in policy.rules and _has(pod.labels, policy.pods)
    ]


def _chain(network: Network, pod: Pod, direction: Direction) -> list[str]:
    """What is let through for one pod, each line once; `return` goes on to the other direction's chain."""
    lines = [
        f"{address} {_port(port)}".strip()
        for policy in _isolating(network, pod, direction)
        for rule in policy.rules[direction]
        for peer in rule.peers or (None,)
        for port in rule.ports or (None,)
        for address in _addresses(network, policy, peer, direction)
    ]
    return list(dict.fromkeys(f"{line} return".strip() for line in lines))


def _addresses(network: Network, policy: Policy, peer: Peer | None, direction: Direction) -> Iterator[str]:
    side = _OTHER[direction]
    if peer is None:
        yield ""
    elif peer.block is not None:
        family = "ip6" if ":" in peer.block else "ip"
        excepted = f" {family} {side} != {{ {', '.join(peer.excepted)} }}" if peer.excepted else ""
        yield f"{family} {side} {peer.block}{excepted}"
    elif pods := network.matching(peer, policy):
        yield f"ip {side} {{ {', '.join(sorted(pod.address for pod in pods))} }}"


def _port(port: Port | None) -> str:
    if port is None:
        return ""
    protocol = port.protocol.lower()
    if port.number is None:
        return f"meta l4proto {protocol}"
    return f"{protocol} dport {port.number}"
