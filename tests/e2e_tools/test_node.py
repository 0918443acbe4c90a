"""What this machine's node does itself: NetworkPolicy objects become nftables rules, claims get folders as volumes."""

from pathlib import Path
from typing import Any

import pytest

from marlaas_e2e.node.observed import read_pod, read_policy
from marlaas_e2e.node.policies import Network, Pod, nft_script
from marlaas_e2e.node.volumes import folder_of, missing_volumes, released_volumes

FOLDER = Path("/volumes")
WEB = Pod("a", "10.244.0.5", {"app": "web"})
CLIENT = Pod("a", "10.244.0.6", {"app": "client"})
STRANGER = Pod("b", "10.244.0.7", {"app": "client"})
NAMESPACES = {"a": {"kubernetes.io/metadata.name": "a"}, "b": {"kubernetes.io/metadata.name": "b", "team": "x"}}
ALL_OF_B = {"namespaceSelector": {"matchLabels": {"team": "x"}}}


def policy(**spec: Any) -> dict[str, Any]:
    selected = {"podSelector": {"matchLabels": {"app": "web"}}}
    return {"metadata": {"namespace": "a", "name": "p"}, "spec": {**selected, **spec}}


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


CLIENTS = {"podSelector": {"matchLabels": {"app": "client"}}}
ANYWHERE = {"ipBlock": {"cidr": "0.0.0.0/0"}}
BLOCK = {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16", "10.2.0.0/16"]}}
OTHER_FAMILY = {"ipBlock": {"cidr": "::/0", "except": ["fe80::/10"]}}


@pytest.mark.parametrize(
    ("rule", "lines"),
    [
        ({}, ["return"]),
        ({"to": [CLIENTS]}, ["ip daddr { 10.244.0.6 } return"]),  # pods of the policy's own namespace
        ({"to": [ALL_OF_B]}, ["ip daddr { 10.244.0.7 } return"]),
        ({"to": [{**ALL_OF_B, "podSelector": {"matchLabels": {"app": "web"}}}]}, []),  # both must hold
        ({"to": [ALL_OF_B, CLIENTS]}, ["ip daddr { 10.244.0.7 } return", "ip daddr { 10.244.0.6 } return"]),
        (
            {"to": [BLOCK], "ports": [{"port": 443}]},
            ["ip daddr 10.0.0.0/8 ip daddr != { 10.1.0.0/16, 10.2.0.0/16 } tcp dport 443 return"],
        ),
        ({"to": [OTHER_FAMILY]}, ["ip6 daddr ::/0 ip6 daddr != { fe80::/10 } return"]),
        ({"ports": [{"port": 53, "protocol": "UDP"}]}, ["udp dport 53 return"]),
        ({"ports": [{"protocol": "UDP"}]}, ["meta l4proto udp return"]),
        ({"ports": [{"port": 5, "protocol": "SCTP"}]}, ["sctp dport 5 return"]),
    ],
)
def test_a_rule_on_the_way_out(rule: dict[str, Any], lines: list[str]):
    assert egress(rule) == [*lines, "drop"]


@pytest.mark.parametrize(
    ("rule", "lines"),
    [
        ({"from": [CLIENTS]}, ["ip saddr { 10.244.0.6 } return"]),
        ({"from": [ANYWHERE], "ports": [{"port": 80}]}, ["ip saddr 0.0.0.0/0 tcp dport 80 return"]),
    ],
)
def test_a_rule_on_the_way_in(rule: dict[str, Any], lines: list[str]):
    assert ingress(rule) == [*lines, "drop"]


def test_policies_add_up():
    found = chains(
        policy(policyTypes=["Egress"], egress=[{"ports": [{"port": 1}]}]),
        policy(policyTypes=["Egress"], egress=[{"ports": [{"port": 1}, {"port": 2}]}]),
    )
    assert found["egress_10_244_0_5"] == ["tcp dport 1 return", "tcp dport 2 return", "drop"]


@pytest.mark.parametrize(
    "spec",
    [
        {"podSelector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]}},
        {"ingress": [{"ports": [{"port": "http"}]}]},
        {"ingress": [{"ports": [{"port": 8000, "endPort": 8010}]}]},
    ],
)
def test_what_is_not_enforced_is_refused(spec: dict[str, Any]):
    with pytest.raises(NotImplementedError):
        read_policy(policy(**spec))


def test_the_table_is_replaced_in_one_transaction():
    script = nft_script(Network([], {}, []))
    assert script.startswith("table inet marlaas_e2e\ndelete table inet marlaas_e2e\ntable inet marlaas_e2e {")


def pod(ip: str) -> dict[str, Any]:
    spec: dict[str, Any] = {"containers": []}
    return {"metadata": {"namespace": "a"}, "spec": spec, "status": {"podIP": ip, "phase": "Running"}}


@pytest.mark.parametrize(
    "change",
    [
        {"status": {"phase": "Pending"}},
        {"status": {"podIP": "10.244.0.9", "phase": "Succeeded"}},
        {"spec": {"hostNetwork": True, "containers": []}},
    ],
)
def test_a_pod_without_an_address_of_its_own_is_left_out(change: dict[str, Any]):
    assert read_pod({**pod("172.30.0.2"), **change}) is None


def claim(phase: str = "Pending", storage_class: str = "folder", **spec: Any) -> dict[str, Any]:
    resources = {"requests": {"storage": "1Gi"}}
    wanted = {"storageClassName": storage_class, "accessModes": ["ReadWriteOnce"], "resources": resources}
    metadata = {"namespace": "a", "name": "data", "uid": "u1"}
    return {"metadata": metadata, "spec": {**wanted, **spec}, "status": {"phase": phase}}


def test_a_pending_claim_gets_a_folder_bound_to_it() -> None:
    [volume] = missing_volumes([claim()], [], FOLDER)
    assert folder_of(volume) == FOLDER / "folder-u1"
    assert volume["spec"]["claimRef"]["uid"] == "u1"
    assert volume["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert volume["spec"]["capacity"] == {"storage": "1Gi"}
    assert missing_volumes([claim()], [volume], FOLDER) == [], "it gets no second one"


@pytest.mark.parametrize("other", [claim("Bound"), claim(storage_class=""), claim(volumeName="chosen")])
def test_claims_that_are_bound_or_anothers_get_none(other: dict[str, Any]) -> None:
    assert missing_volumes([other], [], FOLDER) == []


def test_only_our_own_released_volumes_are_removed() -> None:
    [volume] = missing_volumes([claim()], [], FOLDER)
    released = {**volume, "status": {"phase": "Released"}}
    bound = {**volume, "status": {"phase": "Bound"}}
    foreign = {"metadata": {"name": "x"}, "spec": {}, "status": {"phase": "Released"}}
    assert released_volumes([released, bound, foreign]) == [released]
