"""The e2e's node makes nftables rules of NetworkPolicy objects."""

from typing import Any

import pytest
from tests.tables import rows

from marlaas_e2e.node.policies import Network

NAMESPACES = [{"metadata": {"name": "a"}}, {"metadata": {"name": "b", "labels": {"team": "x"}}}]
CLIENTS = {"podSelector": {"matchLabels": {"app": "client"}}}
ALL_OF_B = {"namespaceSelector": {"matchLabels": {"team": "x"}}}
WEB_OF_B = ALL_OF_B | {"podSelector": {"matchLabels": {"app": "web"}}}
BLOCK = {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16", "10.2.0.0/16"]}}
OTHER_FAMILY = {"ipBlock": {"cidr": "::/0", "except": ["fe80::/10"]}}
OUT, IN = "egress_10_244_0_5", "ingress_10_244_0_5"


def pod(namespace: str, ip: str, app: str, phase: str = "Running", **spec: Any) -> dict[str, Any]:
    metadata = {"namespace": namespace, "labels": {"app": app}}
    return {"metadata": metadata, "spec": spec, "status": {"podIP": ip, "phase": phase}}


PODS = [
    *(pod("a", "10.244.0.5", "web"), pod("a", "10.244.0.6", "client"), pod("b", "10.244.0.7", "client")),
    *(pod("a", "10.244.0.8", "client", "Succeeded"), pod("a", "", "client", "Pending")),
    pod("a", "172.30.0.2", "client", hostNetwork=True),
]


def policy(**spec: Any) -> dict[str, Any]:
    selected = {"podSelector": {"matchLabels": {"app": "web"}}}
    return {"metadata": {"namespace": "a", "name": "p"}, "spec": {**selected, **spec}}


def chains(*policies: dict[str, Any]) -> dict[str, list[str]]:
    script = Network(PODS, NAMESPACES, policies).nft_script()
    assert script.startswith("table inet marlaas_e2e\ndelete table inet marlaas_e2e\ntable inet marlaas_e2e {")
    blocks = [block.partition(" {\n") for block in script.split("  chain ")[1:]]
    return {name: [line.strip() for line in body.splitlines() if line[:4] == "    "] for name, _, body in blocks}


@pytest.mark.parametrize(("spec", "closed"), rows(__file__, "closed"))
def test_a_selected_pod_is_closed_in_the_directions_of_the_policy_only(spec, closed):
    found = chains(policy(**spec))
    assert {name for name in found if "10_244" in name} == set(closed)
    jumps = {OUT: "ip saddr 10.244.0.5 jump", IN: "ip daddr 10.244.0.5 jump"}
    assert found["any_egress"] + found["any_ingress"] == [f"{jumps[one]} {one}" for one in (OUT, IN) if one in closed]


@pytest.mark.parametrize(("rule", "lines"), rows(__file__, "rules"))
def test_a_rule_lets_through_what_it_names(rule, lines):
    once = policy(policyTypes=["Egress"], egress=[rule])
    assert chains(once, once)[OUT] == [*lines, "drop"]
    back = {("from" if key == "to" else key): value for key, value in rule.items()}
    assert chains(policy(ingress=[back]))[IN] == [*(line.replace("daddr", "saddr") for line in lines), "drop"]


@pytest.mark.parametrize("spec", rows(__file__, "unenforced"))
def test_what_is_not_enforced_is_refused(spec):
    with pytest.raises(NotImplementedError):
        chains(policy(**spec))
