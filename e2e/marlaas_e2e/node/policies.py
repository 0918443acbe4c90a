"""NetworkPolicy objects as an nftables script.

A test fixture: it enforces what the objects mean (selectors, address blocks, ports, both directions, isolation by
default), and is no network vendor's implementation. It knows IPv4 pods only, and no named ports, ranges of ports and
expressions, which no policy of ours has. Connections that exist when a policy comes are left alone, and a new pod is
open until the kubelet has reported its address (a second) and the next pass (a tenth of a second).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from marlaas_e2e.api import Object

TABLE = "marlaas_e2e"
KINDS = ("/api/v1/pods", "/api/v1/namespaces", "/apis/networking.k8s.io/v1/networkpolicies")
"""Paths of the collections that policies speak of, in the order of `Network`'s arguments."""
_SIDES = {"egress": ("to", "saddr", "daddr"), "ingress": ("from", "daddr", "saddr")}
"""By direction: the key of a rule's peers, and nft's words for the address of the pod and of its peer."""
_OVER = {"Succeeded", "Failed"}  # their addresses are given to others
_KNOWN = "ct state established,related accept"


class Network:
    """All that policies speak of, as the API server lists it."""

    def __init__(self, pods: Sequence[Object], namespaces: Sequence[Object], policies: Sequence[Object]) -> None:
        self._pods = sorted(filter(_has_address, pods), key=_address)
        self._namespaces = {each["metadata"]["name"]: each for each in namespaces}
        self._policies = policies

    def nft_script(self) -> str:
        """The whole table anew, in one transaction of `nft -f -`. Raises NotImplementedError."""
        lines = [f"table inet {TABLE}", f"delete table inet {TABLE}", f"table inet {TABLE} {{"]
        for direction, (_, own, _) in _SIDES.items():
            jumps = []
            for pod in self._pods:
                if policies := [each for each in self._policies if _isolates(each, pod, direction)]:
                    address, name = _address(pod), f"{direction}_{_address(pod).replace('.', '_')}"
                    passes = dict.fromkeys(line for policy in policies for line in self._passes(policy, direction))
                    lines += _chain(name, *passes, "drop")
                    jumps.append(f"ip {own} {address} jump {name}")
            lines += _chain(f"any_{direction}", *jumps)
        hook = "type filter hook {} priority filter - 5; policy accept;"
        lines += _chain("forwarded", hook.format("forward"), _KNOWN, "jump any_egress", "jump any_ingress")
        lines += _chain("received", hook.format("input"), _KNOWN, "jump any_egress")
        return "\n".join([*lines, "}"]) + "\n"

    def _passes(self, policy: Object, direction: str) -> Iterator[str]:
        """What a policy lets through; `return` goes on to the other direction's chain."""
        key, _, side = _SIDES[direction]
        for rule in policy["spec"].get(direction) or ():
            for peer in rule.get(key) or (None,):
                for port in rule.get("ports") or (None,):
                    if (address := self._addresses(peer, policy, side)) is not None:
                        yield " ".join(filter(None, (address, _port(port), "return")))

    def _addresses(self, peer: Object | None, policy: Object, side: str) -> str | None:
        """The addresses of a peer in nft's words, empty for everyone; None if there is no such pod."""
        if peer is None:
            return ""
        if block := peer.get("ipBlock"):
            family = "ip6" if ":" in block["cidr"] else "ip"
            excepted = ", ".join(block.get("except") or ())
            return f"{family} {side} {block['cidr']}" + (f" {family} {side} != {{ {excepted} }}" if excepted else "")
        addresses = ", ".join(_address(pod) for pod in self._pods if self._is_peer(pod, peer, policy))
        return f"ip {side} {{ {addresses} }}" if addresses else None

    def _is_peer(self, pod: Object, peer: Object, policy: Object) -> bool:
        namespace, chosen = pod["metadata"]["namespace"], peer.get("namespaceSelector")
        if chosen is None:
            in_scope = namespace == policy["metadata"]["namespace"]
        else:
            in_scope = _selects(chosen, self._namespaces.get(namespace, {"metadata": {}}))
        return in_scope and _selects(peer.get("podSelector"), pod)


def _has_address(pod: Object) -> bool:
    """Whether it has an address of its own: it has started, is not over, and is not in the host's network."""
    status = pod.get("status", {})
    return bool(status.get("podIP")) and status.get("phase") not in _OVER and not pod["spec"].get("hostNetwork")


def _address(pod: Object) -> str:
    return str(pod["status"]["podIP"])


def _isolates(policy: Object, pod: Object, direction: str) -> bool:
    """`policyTypes` left out means Ingress, and Egress too when it has egress rules."""
    spec = policy["spec"]
    types = spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])]
    here = policy["metadata"]["namespace"] == pod["metadata"]["namespace"] and direction.capitalize() in types
    return here and _selects(spec.get("podSelector"), pod)


def _selects(selector: Mapping[str, Any] | None, body: Object) -> bool:
    if selector and selector.get("matchExpressions"):
        raise NotImplementedError(f"expressions in selectors: {selector}")
    wanted: dict[str, str] = (selector or {}).get("matchLabels") or {}
    return wanted.items() <= (body["metadata"].get("labels") or {}).items()


def _port(body: Object | None) -> str:
    if body is None:
        return ""
    if isinstance(body.get("port"), str) or "endPort" in body:
        raise NotImplementedError(f"ports by name and ranges: {body}")
    protocol = body.get("protocol", "TCP").lower()
    return f"{protocol} dport {body['port']}" if "port" in body else f"meta l4proto {protocol}"


def _chain(name: str, *lines: str) -> list[str]:
    return [f"  chain {name} {{", *(f"    {line}" for line in lines), "  }"]
