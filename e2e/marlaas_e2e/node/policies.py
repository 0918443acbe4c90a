"""NetworkPolicy objects as an nftables script.

A test fixture: it enforces what the objects mean (selectors, address blocks, ports, both directions, isolation by
default), and is no network vendor's implementation. It knows IPv4 only. Connections that exist when a policy comes
are left alone, and a new pod is open until the next pass (a fraction of a second).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

TABLE = "marlaas_e2e"
Direction = Literal["egress", "ingress"]


@dataclass(frozen=True, slots=True)
class Requirement:
    """One matchExpressions entry."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def holds(self, labels: Mapping[str, str]) -> bool:
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels
            case _:
                raise ValueError(f"selector operator {self.operator}")


@dataclass(frozen=True, slots=True)
class Selector:
    """A label selector; an empty one selects everything."""

    requirements: tuple[Requirement, ...] = ()

    def selects(self, labels: Mapping[str, str]) -> bool:
        return all(requirement.holds(labels) for requirement in self.requirements)


@dataclass(frozen=True, slots=True)
class Peer:
    """The other side of a rule: an address block, or pods by label and namespace."""

    block: str | None = None
    excepted: tuple[str, ...] = ()
    pods: Selector | None = None
    namespaces: Selector | None = None


@dataclass(frozen=True, slots=True)
class Port:
    """A port by number or name, a range up to `end`, or every port of a protocol (number None)."""

    protocol: str = "TCP"
    number: int | str | None = None
    end: int | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """What is allowed: any of the peers (none given: everyone) on any of the ports (none given: all)."""

    peers: tuple[Peer, ...] = ()
    ports: tuple[Port, ...] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """One NetworkPolicy. A direction that it does not isolate is None."""

    namespace: str
    selector: Selector
    egress: tuple[Rule, ...] | None = None
    ingress: tuple[Rule, ...] | None = None

    def rules(self, direction: Direction) -> tuple[Rule, ...] | None:
        return self.egress if direction == "egress" else self.ingress


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod with an address of its own; `ports` maps (name, protocol) to the number."""

    namespace: str
    address: str
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[tuple[str, str], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Network:
    """All that policies speak of. `namespaces` maps a name to its labels."""

    pods: Sequence[Pod]
    namespaces: Mapping[str, Mapping[str, str]]
    policies: Sequence[Policy]

    def matching(self, peer: Peer, policy: Policy) -> list[Pod]:
        """The pods that a peer without an address block means."""
        return [pod for pod in self.pods if self._in_scope(pod, peer, policy) and _selected(pod, peer)]

    def _in_scope(self, pod: Pod, peer: Peer, policy: Policy) -> bool:
        if peer.namespaces is None:
            return pod.namespace == policy.namespace
        return peer.namespaces.selects(self.namespaces.get(pod.namespace, {}))


def _selected(pod: Pod, peer: Peer) -> bool:
    return peer.pods is None or peer.pods.selects(pod.labels)


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
        if policy.namespace == pod.namespace
        and policy.selector.selects(pod.labels)
        and policy.rules(direction) is not None
    ]


def _chain(network: Network, pod: Pod, direction: Direction) -> list[str]:
    """What is let through for one pod, each line once; `return` goes on to the other direction's chain."""
    lines = [
        f"{match} return".strip()
        for policy in _isolating(network, pod, direction)
        for rule in policy.rules(direction) or ()
        for match in _matches(network, policy, rule, (pod, direction))
    ]
    return list(dict.fromkeys(lines))


def _matches(network: Network, policy: Policy, rule: Rule, own: tuple[Pod, Direction]) -> Iterator[str]:
    pod, direction = own
    for peer in rule.peers or (None,):
        for port in rule.ports or (None,):
            if port is None or not isinstance(port.number, str):
                yield from _numbered(_addresses(network, policy, peer, direction), port)
            elif direction == "egress":
                yield from _named(_candidates(network, policy, peer), port)
            elif (port.number, port.protocol) in pod.ports:
                number = Port(port.protocol, pod.ports[port.number, port.protocol])
                yield from _numbered(_addresses(network, policy, peer, direction), number)


def _numbered(addresses: Iterator[str], port: Port | None) -> Iterator[str]:
    return (f"{address} {_port(port)}".strip() for address in addresses)


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


def _candidates(network: Network, policy: Policy, peer: Peer | None) -> Sequence[Pod]:
    """The pods whose names of ports count; an address block has no names."""
    if peer is None:
        return network.pods
    return [] if peer.block is not None else network.matching(peer, policy)


def _named(receivers: Sequence[Pod], port: Port) -> Iterator[str]:
    """On the way out a name is looked up at each receiver: it may be another number at each."""
    for receiver in receivers:
        number = receiver.ports.get((str(port.number), port.protocol))
        if number is not None:
            yield f"ip daddr {receiver.address} {_port(Port(port.protocol, number))}"


def _port(port: Port | None) -> str:
    if port is None:
        return ""
    protocol = port.protocol.lower()
    if port.number is None:
        return f"meta l4proto {protocol}"
    return f"{protocol} dport {port.number}" + (f"-{port.end}" if port.end is not None else "")
