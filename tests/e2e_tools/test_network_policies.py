"""NetworkPolicy objects become nftables rules: what is let through, and what is not, line by line."""

from typing import Any

import pytest

from marlaas_e2e.node.observed import read_pod, read_policy
from marlaas_e2e.node.policies import Network, Pod, nft_script

WEB = Pod("a", "10.244.0.5", {"app": "web"}, {("http", "TCP"): 8080})
CLIENT = Pod("a", "10.244.0.6", {"app": "client"})
STRANGER = Pod("b", "10.244.0.7", {"app": "client"}, {("http", "TCP"): 9090})
NAMESPACES = {"a": {"kubernetes.io/metadata.name": "a"}, "b": {"kubernetes.io/metadata.name": "b", "team": "x"}}
ALL_OF_B = {"namespaceSelector": {"matchLabels": {"team": "x"}}}


def policy(**spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "a", "name": "p"},
        "spec": {"podSelector": {"matchLabels": {"app": "web"}}, **spec},
    }


def chains(*bodies: dict[str, Any]) -> dict[str, list[str]]:
    script = nft_script(Network([WEB, CLIENT, STRANGER], NAMESPACES, [read_policy(body) for body in bodies]))
    found: dict[str, list[str]] = {}
    for line in script.splitlines():
        if line.startswith("  chain "):
            found[name := line.split()[1]] = []
        elif line.startswith("    "):
            found[name].append(line.strip())
    return found


def egress(*rules: dict[str, Any]) -> list[str]:
    return chains(policy(policyTypes=["Egress"], egress=list(rules)))["egress_10_244_0_5"]


def ingress(*rules: dict[str, Any]) -> list[str]:
    return chains(policy(ingress=list(rules)))["ingress_10_244_0_5"]


def test_without_policies_nothing_is_looked_at():
    assert chains()["any_egress"] == []
    assert chains()["any_ingress"] == []


def test_a_selected_pod_is_closed_in_the_directions_of_the_policy_only():
    found = chains(policy(policyTypes=["Egress"]))
    assert found["egress_10_244_0_5"] == ["drop"]
    assert found["any_egress"] == ["ip saddr 10.244.0.5 jump egress_10_244_0_5"]
    assert found["any_ingress"] == []


@pytest.mark.parametrize(
    ("spec", "closed"),
    [
        ({}, {"ingress_10_244_0_5"}),
        ({"egress": [{}]}, {"ingress_10_244_0_5", "egress_10_244_0_5"}),
        ({"ingress": [], "egress": []}, {"ingress_10_244_0_5"}),
        ({"policyTypes": ["Ingress", "Egress"]}, {"ingress_10_244_0_5", "egress_10_244_0_5"}),
    ],
)
def test_left_out_policy_types_are_ingress_and_egress_only_where_it_has_rules(spec: dict[str, Any], closed: set[str]):
    assert {name for name in chains(policy(**spec)) if "10_244" in name} == closed


def test_an_empty_rule_lets_everything_through():
    assert egress({}) == ["return", "drop"]


def test_a_pod_selector_means_pods_of_the_policys_own_namespace():
    peers = [{"podSelector": {"matchLabels": {"app": "client"}}}]
    assert egress({"to": peers}) == ["ip daddr { 10.244.0.6 } return", "drop"]
    assert ingress({"from": peers}) == ["ip saddr { 10.244.0.6 } return", "drop"]


def test_a_namespace_selector_alone_means_every_pod_there():
    assert egress({"to": [ALL_OF_B]}) == ["ip daddr { 10.244.0.7 } return", "drop"]


def test_both_selectors_in_one_peer_must_hold():
    web_of_b = {**ALL_OF_B, "podSelector": {"matchLabels": {"app": "web"}}}
    assert egress({"to": [web_of_b]}) == ["drop"]


def test_two_peers_are_alternatives():
    rules = egress({"to": [ALL_OF_B, {"podSelector": {"matchLabels": {"app": "client"}}}]})
    assert rules == ["ip daddr { 10.244.0.7 } return", "ip daddr { 10.244.0.6 } return", "drop"]


def test_an_address_block_without_its_exceptions():
    block = {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16", "10.2.0.0/16"]}}
    ports = [{"port": 443}]
    assert egress({"to": [block], "ports": ports}) == [
        "ip daddr 10.0.0.0/8 ip daddr != { 10.1.0.0/16, 10.2.0.0/16 } tcp dport 443 return",
        "drop",
    ]


def test_a_block_of_the_other_family_disturbs_nothing():
    block = {"ipBlock": {"cidr": "::/0", "except": ["fe80::/10"]}}
    assert egress({"to": [block]}) == ["ip6 daddr ::/0 ip6 daddr != { fe80::/10 } return", "drop"]


@pytest.mark.parametrize(
    ("port", "match"),
    [
        ({"port": 53, "protocol": "UDP"}, "udp dport 53 return"),
        ({"port": 8000, "endPort": 8010}, "tcp dport 8000-8010 return"),
        ({"protocol": "UDP"}, "meta l4proto udp return"),
        ({"port": 5, "protocol": "SCTP"}, "sctp dport 5 return"),
    ],
)
def test_ports(port: dict[str, Any], match: str):
    assert egress({"ports": [port]}) == [match, "drop"]


def test_a_named_port_on_the_way_out_is_each_receivers_own_number():
    assert egress({"to": [ALL_OF_B], "ports": [{"port": "http"}]}) == [
        "ip daddr 10.244.0.7 tcp dport 9090 return",
        "drop",
    ]


def test_a_named_port_on_the_way_in_is_the_pods_own_number():
    assert ingress({"ports": [{"port": "http"}]}) == ["tcp dport 8080 return", "drop"]
    assert ingress({"from": [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "ports": [{"port": "http"}]}) == [
        "ip saddr 0.0.0.0/0 tcp dport 8080 return",
        "drop",
    ]


def test_a_named_port_that_nobody_has_opens_nothing():
    assert ingress({"ports": [{"port": "metrics"}]}) == ["drop"]
    assert egress({"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "ports": [{"port": "http"}]}) == ["drop"]


def test_policies_add_up():
    found = chains(
        policy(policyTypes=["Egress"], egress=[{"ports": [{"port": 1}]}]),
        policy(policyTypes=["Egress"], egress=[{"ports": [{"port": 1}, {"port": 2}]}]),
    )
    assert found["egress_10_244_0_5"] == ["tcp dport 1 return", "tcp dport 2 return", "drop"]


@pytest.mark.parametrize(
    ("expression", "selected"),
    [
        ({"key": "app", "operator": "In", "values": ["web", "x"]}, True),
        ({"key": "app", "operator": "NotIn", "values": ["web"]}, False),
        ({"key": "other", "operator": "NotIn", "values": ["web"]}, True),
        ({"key": "app", "operator": "Exists"}, True),
        ({"key": "app", "operator": "DoesNotExist"}, False),
    ],
)
def test_selector_expressions(expression: dict[str, Any], selected: bool):
    found = chains(policy(podSelector={"matchExpressions": [expression]}))
    assert ("ingress_10_244_0_5" in found) is selected


def test_the_table_is_replaced_in_one_transaction():
    script = nft_script(Network([], {}, []))
    assert script.startswith("table inet marlaas_e2e\ndelete table inet marlaas_e2e\ntable inet marlaas_e2e {")


@pytest.mark.parametrize(
    "change",
    [
        {"status": {"phase": "Pending"}},
        {"status": {"podIP": "10.244.0.9", "phase": "Succeeded"}},
        {"spec": {"hostNetwork": True, "containers": []}},
    ],
)
def test_a_pod_without_an_address_of_its_own_is_left_out(change: dict[str, Any]):
    body = {
        "metadata": {"namespace": "a"},
        "spec": {"containers": []},
        "status": {"podIP": "172.30.0.2", "phase": "Running"},
    }
    assert read_pod({**body, **change}) is None


def test_a_pods_named_ports_are_read_from_its_containers():
    ports = [
        {"name": "http", "containerPort": 80},
        {"containerPort": 81},
        {"name": "dns", "containerPort": 53, "protocol": "UDP"},
    ]
    body = {
        "metadata": {"namespace": "a"},
        "spec": {"containers": [{"ports": ports}]},
        "status": {"podIP": "10.244.0.9", "phase": "Running"},
    }
    assert read_pod(body) == Pod("a", "10.244.0.9", {}, {("http", "TCP"): 80, ("dns", "UDP"): 53})
