"""Pods, namespaces and policies as the API server tells them, read into the values of `policies`."""

from typing import Any

from marlaas_e2e.api import ApiClient, Object
from marlaas_e2e.node.policies import Direction, Labels, Network, Peer, Pod, Policy, Port, Rule

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
    return Pod(body["metadata"]["namespace"], address, body["metadata"].get("labels") or {})


def read_policy(body: Object) -> Policy:
    """`policyTypes` left out means Ingress, and Egress too when it has egress rules. Raises NotImplementedError."""
    spec = body["spec"]
    types = spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])]
    sides: dict[Direction, str] = {"egress": "to", "ingress": "from"}
    rules = {each: _rules(spec, each, side) for each, side in sides.items() if each.capitalize() in types}
    return Policy(body["metadata"]["namespace"], _labels(spec.get("podSelector") or {}), rules)


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
        pods=_labels(pods or {}),
        namespaces=None if namespaces is None else _labels(namespaces),
    )


def _port(body: dict[str, Any]) -> Port:
    if isinstance(body.get("port"), str) or "endPort" in body:
        raise NotImplementedError(f"ports by name and ranges: {body}")
    return Port(body.get("protocol", "TCP"), body.get("port"))


def _labels(selector: dict[str, Any]) -> Labels:
    if selector.get("matchExpressions"):
        raise NotImplementedError(f"expressions in selectors: {selector}")
    return selector.get("matchLabels") or {}
