"""What a job's egress opens, and that it never opens the addresses where clouds hand out credentials."""

import ipaddress

import pytest
from tests.operator.policies.scenes import INSTALLATION, modelpool

from marlaas_api.messages.job_spec import EgressRule
from marlaas_operator.manifests.network import from_metrics_readers, to_destinations, to_https
from marlaas_operator.manifests.pods import sandbox_name, stamped, workers_name
from marlaas_operator.manifests.pool import Pool, pool_document, role_objects
from marlaas_operator.snapshot import Meta


def reaches(rules, address, port):
    """Whether a packet to the address is let through by rules with addresses alone."""
    ip = ipaddress.ip_address(address)
    return any(
        ip in ipaddress.ip_network(to["ipBlock"]["cidr"])
        and not any(ip in ipaddress.ip_network(hole) for hole in to["ipBlock"].get("except", ()))
        and ("ports" not in rule or port in [p["port"] for p in rule["ports"]])
        for rule in rules
        for to in rule["to"]
    )


@pytest.mark.parametrize(
    ("cidr", "ports", "address", "port", "open_"),
    [
        ("10.1.0.0/16", (443,), "10.1.2.3", 443, True),
        ("10.1.0.0/16", (443,), "10.1.2.3", 80, False),
        ("10.1.0.0/16", (), "10.1.2.3", 6443, True),
        ("10.1.0.0/16", (), "10.2.0.1", 443, False),
        ("10.1.2.3/16", (), "10.1.0.1", 443, True),
        ("0.0.0.0/0", (80,), "198.51.100.10", 80, True),
        ("0.0.0.0/0", (80,), "169.254.169.254", 80, False),
        ("169.254.0.0/15", (80,), "169.254.169.254", 80, False),
        ("::/0", (), "fe80::1", 80, False),
        ("::/0", (), "2001:db8::1", 80, True),
        ("0.0.0.0/0", (), "168.63.129.16", 80, False),
        ("168.63.0.0/16", (), "168.63.129.16", 32526, False),
        ("168.63.0.0/16", (), "168.63.129.17", 80, True),
        ("100.64.0.0/10", (), "100.100.100.200", 80, False),
        ("0.0.0.0/0", (), "192.0.0.192", 80, False),
        ("::/0", (), "fd00:ec2::254", 80, False),
        ("fd00::/8", (), "fd20:ce::254", 80, False),
        ("fd00::/8", (), "fd20:ce::253", 80, True),
    ],
)
def test_egress_opens_what_it_names_but_no_metadata_address(cidr, ports, address, port, open_):
    assert reaches(to_destinations([EgressRule(cidr=cidr, ports=ports)]), address, port) is open_


@pytest.mark.parametrize("cidr", ["169.254.169.254/32", "169.254.0.0/16", "fe80::/64", "168.63.129.16/32"])
def test_a_metadata_range_that_slipped_past_validation_opens_nothing(cidr):
    assert to_destinations([EgressRule.model_construct(cidr=cidr, ports=())]) == []


def test_workers_reach_the_hub_by_https_and_no_metadata_address():
    assert reaches([to_https()], "198.51.100.10", 443)
    assert not reaches([to_https()], "198.51.100.10", 80)
    for metadata in ("169.254.169.254", "168.63.129.16", "fd00:ec2::254"):
        assert not reaches([to_https()], metadata, 443)


def test_figures_of_workers_are_for_those_whom_the_chart_names_and_nobody_else():
    monitoring = {"podSelector": {"matchLabels": {"app": "prometheus"}}}
    named = INSTALLATION.model_copy(update={"metrics_from": (monitoring,)})
    rule = {"from": [monitoring], "ports": [{"protocol": "TCP", "port": 8081}]}
    pool = Pool(Meta(name="tiny", uid="p1"), modelpool(), {"rollout": "creds", "trainer": "creds"})
    for installation, ingress in ((INSTALLATION, []), (named, [rule])):
        assert from_metrics_readers(installation, 8081) == ingress
        policy = next(one for one in role_objects(pool, installation, "rollout") if one["kind"] == "NetworkPolicy")
        assert policy["spec"]["ingress"] == ingress


def test_a_pool_whose_name_begins_with_a_digit_has_a_service_that_does_not():
    assert workers_name("7b", "rollout").startswith("p-7b-rollout-")
    assert workers_name("7b", "rollout") != workers_name("p-7b", "rollout")


@pytest.mark.parametrize("made", [sandbox_name, lambda name: workers_name(name, "trainer")])
def test_long_names_that_differ_at_their_end_stay_different(made):
    first, second = made("a" * 62 + "b"), made("a" * 62 + "c")
    assert first != second
    assert len(first) <= 63
    assert not made("a" * 42 + "-" * 12 + "b").endswith("-")


def test_the_hash_is_that_of_the_desire_whatever_the_order_of_its_keys():
    one = {"kind": "A", "metadata": {"name": "n", "annotations": {"x": "y"}}, "spec": {"a": 1, "b": 2}}
    other = {"spec": {"b": 2, "a": 1}, "metadata": {"annotations": {"x": "y"}, "name": "n"}, "kind": "A"}
    assert stamped(one)["metadata"]["annotations"] == stamped(other)["metadata"]["annotations"]
    assert stamped(one) != stamped({**one, "spec": {"a": 1, "b": 3}})
    assert stamped(one)["metadata"]["annotations"]["x"] == "y"


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ({"builtin": "tiny"}, ""),
        ({"hub": {"id": "a/b"}}, ""),
        ({"path": "/models/a"}, "/models/a"),
        ({"pvc": {"claimName": "m", "path": "/"}}, "/model"),
        ({"pvc": {"claimName": "m", "path": "/a/b/"}}, "/model/a/b"),
    ],
)
def test_the_model_lies_where_the_pod_mounts_it_and_otherwise_the_init_container_finds_it(model, path):
    assert pool_document(modelpool(model=model)).model_path == path


@pytest.mark.parametrize(
    ("workers", "threads"), [({}, None), ({"cpu": "3500m"}, 4), ({"cpu": "100m"}, 1), ({"cpu": "8", "threads": 2}, 2)]
)
def test_a_worker_that_asked_for_some_cores_computes_on_as_many(workers, threads):
    assert pool_document(modelpool(rollout=workers)).spec.rollout.threads == threads
