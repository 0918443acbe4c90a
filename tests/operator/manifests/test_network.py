"""What a job's egress opens: what the installation opens to jobs, and never the addresses where clouds hand out credentials."""

import ipaddress

import pytest
from pydantic import ValidationError
from tests.operator.objects import installation
from tests.operator.policies.scenes import INSTALLATION, modelpool
from tests.tables import rows

from marlaas_api.messages.job_spec import EgressRule
from marlaas_operator.manifests.network import closed_destinations, from_metrics_readers, to_destinations
from marlaas_operator.manifests.pods import sandbox_name, stamped, workers_name
from marlaas_operator.manifests.pool import Pool, pool_document, role_objects
from marlaas_operator.snapshot import Meta

NETWORK = {"closedRanges": ["10.0.0.0/8", "10.96.0.0/16", "fc00::/7"]}


def opening(*ranges):
    return installation(network={**NETWORK, "jobEgress": ranges})


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


@pytest.mark.parametrize(("allowed", "cidr", "ports", "address", "port", "open_"), rows(__file__, "egress"))
def test_egress_opens_what_it_names_as_far_as_the_installation_does(allowed, cidr, ports, address, port, open_):
    installation = opening(allowed)
    opened = to_destinations([EgressRule(cidr=cidr, ports=ports)], installation)
    assert reaches(opened, address, port) is open_
    assert bool(opened) is not bool(closed_destinations([cidr], installation))


def test_no_installation_opens_a_metadata_service():
    with pytest.raises(ValidationError, match="is link-local or a cloud"):
        opening("169.254.169.0/24")


def test_workers_reach_store_and_hub_on_their_ports_and_nothing_in_the_cluster():
    def egress(source, **given):
        pool = Pool(Meta(name="tiny", uid="p1"), modelpool(model=source), {"rollout": "creds", "trainer": "creds"})
        made = role_objects(pool, installation(**given), "trainer")
        policy = next(one for one in made if one["kind"] == "NetworkPolicy")
        return [rule for rule in policy["spec"]["egress"] if any("ipBlock" in peer for peer in rule["to"])]

    store = {"blobs": {"url": "s3://bucket"}}
    assert egress({"builtin": "tiny"}) == []
    for source, given in (({"hub": {"id": "a/b"}}, {}), ({"builtin": "tiny"}, store)):
        assert reaches(egress(source, **given), "198.51.100.10", 443)
        for address, port in rows(__file__, "closed_to_workers"):
            assert not reaches(egress(source, **given), address, port)
    minio = {"ranges": ["10.20.0.0/24"], "ports": [9000]}
    private = egress({"builtin": "tiny"}, **store, network={**NETWORK, "store": minio})
    assert reaches(private, "10.20.0.5", 9000)
    assert not reaches(private, "198.51.100.10", 443)


def test_figures_of_workers_are_for_those_whom_the_chart_names_and_nobody_else():
    monitoring = {"podSelector": {"matchLabels": {"app": "prometheus"}}}
    named = INSTALLATION.model_copy(update={"metrics_from": (monitoring,)})
    rule = {"from": [monitoring], "ports": [{"protocol": "TCP", "port": 8081}]}
    pool = Pool(Meta(name="tiny", uid="p1"), modelpool(), {"rollout": "creds", "trainer": "creds"})
    for installed, ingress in ((INSTALLATION, []), (named, [rule])):
        assert from_metrics_readers(installed, 8081) == ingress
        policy = next(one for one in role_objects(pool, installed, "rollout") if one["kind"] == "NetworkPolicy")
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


@pytest.mark.parametrize(("model", "path"), rows(__file__, "models"))
def test_the_model_lies_where_the_pod_mounts_it_and_otherwise_the_init_container_finds_it(model, path):
    assert pool_document(modelpool(model=model)).model_path == path


@pytest.mark.parametrize(("workers", "threads"), rows(__file__, "threads"))
def test_a_worker_that_asked_for_some_cores_computes_on_as_many(workers, threads):
    assert pool_document(modelpool(rollout=workers)).spec.rollout.threads == threads
