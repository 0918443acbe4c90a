"""Pods, namespaces and policies as the API server tells them, read into the values of `policies`."""

from typing import Any

from marlaas_e2e.api import ApiClient, Object
from marlaas_e2e.node.policies import Network, Peer, Pod, Policy, Port, Requirement, Rule, Selector

_OVER = {"Succeeded", "Failed"}  # their addresses are given to others


def observe(client: ApiClient) -> Network:
    """Everything in three lists from the server's cache."""
    namespaces = client.list("/api/v1/namespaces?resourceVersion=0")
    policies = client.list("/apis/networking.k8s.io/v1/networkpolicies?resourceVersion=0")
    return Network(
        pods=[pod for each in client.list("/api/v1/pods?resourceVersion=0") if (pod := read_pod(each)) is not None],
        namespaces={each["metadata"]["name"]: each["metadata"].get("labels") or {} for each in namespaces},
        policies=[read_policy(each) for each in policies],
    )


def read_pod(body: Object) -> Pod | None:
    """None for a pod without an address of its own: not started, finished, or in the host's network."""
    address = body.get("status", {}).get("podIP")
    if not address or body["spec"].get("hostNetwork") or body["status"].get("phase") in _OVER:
        return None
    ports = {
        (port["name"], port.get("protocol", "TCP")): port["containerPort"]
        for container in [*body["spec"]["containers"], *(body["spec"].get("initContainers") or [])]
        for port in container.get("ports") or []
        if "name" in port
    }
    return Pod(body["metadata"]["namespace"], address, body["metadata"].get("labels") or {}, ports)


def read_policy(body: Object) -> Policy:
    """`policyTypes` left out means Ingress, and Egress too when it has egress rules."""
    spec = body["spec"]
    types = spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])]
    return Policy(
        namespace=body["metadata"]["namespace"],
        selector=_selector(spec.get("podSelector") or {}),
        egress=_rules(spec, "egress", "to") if "Egress" in types else None,
        ingress=_rules(spec, "ingress", "from") if "Ingress" in types else None,
    )


def _rules(spec: dict[str, Any], direction: str, side: str) -> tuple[Rule, ...]:
    return tuple(
        Rule(tuple(map(_peer, rule.get(side) or [])), tuple(map(_port, rule.get("ports") or [])))
        for rule in spec.get(direction) or []
    )


def _peer(body: dict[str, Any]) -> Peer:
    block = body.get("ipBlock") or {}
    pods, namespaces = body.get("podSelector"), body.get("namespaceSelector")
    return Peer(
        block=block.get("cidr"),
        excepted=tuple(block.get("except") or ()),
        pods=None if pods is None else _selector(pods),
        namespaces=None if namespaces is None else _selector(namespaces),
    )


def _port(body: dict[str, Any]) -> Port:
    return Port(body.get("protocol", "TCP"), body.get("port"), body.get("endPort"))


def _selector(body: dict[str, Any]) -> Selector:
    equal = [Requirement(key, "In", (value,)) for key, value in (body.get("matchLabels") or {}).items()]
    others = [
        Requirement(each["key"], each["operator"], tuple(each.get("values") or ()))
        for each in body.get("matchExpressions") or []
    ]
    return Selector((*equal, *others))
