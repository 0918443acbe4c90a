from pathlib import Path

import pytest

from marlaas_api.documents import job_spec
from marlaas_api.kinds import ModelPool, RLJob, RLJobSpec, Tenant
from marlaas_api.kinds.fields import did_you_mean, listed, nearest
from marlaas_api.kinds.problems import InvalidObject, parse
from marlaas_api.messages import JobDocument
from marlaas_api.numeric import quantity
from marlaas_api.wire import decode, encode

CRDS = Path(__file__).parents[2] / "crds"
BODY = {
    "apiVersion": "marlaas.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "sums", "namespace": "team-a"},
    "spec": {"poolRef": {"name": "tiny"}, "environment": {"name": "reverse"}, "training": {"steps": 3}},
}


@pytest.mark.parametrize(
    ("text", "value"),
    [("2", 2), ("500m", 0.5), ("0.5", 0.5), ("1k", 1e3), ("512Mi", 512 * 2**20), ("1.5Gi", 1.5 * 2**30), ("3T", 3e12)],
)
def test_a_quantity_has_the_value_that_kubernetes_gives_it(text: str, value: float) -> None:
    assert quantity(text) == pytest.approx(value)


def test_a_whole_number_is_a_quantity_too() -> None:
    pool = {**BODY, "kind": "ModelPool", "spec": {"model": {"builtin": "tiny"}, "trainer": {"cpu": 2}}}
    assert parse(ModelPool, pool).spec.trainer.cpu == "2"


def test_a_job_survives_the_wire() -> None:
    spec = RLJobSpec.model_validate({**BODY["spec"], "agents": [{"name": "a", "adapter": {"targets": ["q_proj"]}}]})
    identity = {"namespace": "team-a", "job": "sums", "uid": "u"}
    document = JobDocument(**identity, pool="tiny", tenant="team-a", spec=job_spec(spec))
    assert decode(encode(document)) == document


def test_defaults_are_those_of_the_design() -> None:
    spec = parse(RLJob, BODY).spec
    assert [agent.name for agent in spec.agents] == ["policy"]
    assert (spec.training.algorithm, spec.training.max_staleness, spec.rollout.group_size) == ("grpo", 1, 8)
    assert (spec.evaluation.promote, spec.adapter_retention, spec.suspend) == ("last", "keep", False)


def test_a_namespace_that_is_not_given_is_default() -> None:
    assert parse(RLJob, {**BODY, "metadata": {"name": "sums"}}).metadata.namespace == "default"


def test_what_the_api_server_adds_to_an_object_is_no_error() -> None:
    metadata = {
        "name": "sums",
        "uid": "u-1",
        "generation": 3,
        "resourceVersion": "7",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "managedFields": [],
        "finalizers": ["marlaas.dev/cleanup"],
    }
    status = {"phase": "Running", "step": 2, "agents": [{"name": "policy", "policyVersion": 2}], "newerField": 1}
    job = parse(RLJob, {**BODY, "metadata": metadata, "status": status})
    assert (job.metadata.uid, job.metadata.generation) == ("u-1", 3)
    assert job.status is not None
    assert job.status.agents[0].policy_version == 2


def test_nulls_in_the_arguments_of_an_environment_are_kept() -> None:
    environment = {"name": "reverse", "args": {"seed": None, "list": [None]}}
    job = parse(RLJob, {**BODY, "spec": {**BODY["spec"], "environment": environment}})
    assert job.spec.environment.args == {"seed": None, "list": [None]}


def test_an_invalid_object_says_everything_at_once() -> None:
    body = {**BODY, "kind": "Tenant", "spec": {"namespaces": [], "weight": 0, "wieght": 1}}
    with pytest.raises(InvalidObject) as caught:
        parse(Tenant, body)
    assert str(caught.value).splitlines() == [
        "spec.namespaces: must have at least 1 entry, found 0",
        "spec.weight: must be more than 0, found 0",
        "spec.wieght: unknown field; did you mean 'weight'?",
    ]


@pytest.mark.parametrize(
    ("cidr", "text"),
    [
        ("169.254.169.254/32", "link-local"),
        ("169.254.0.0/16", "link-local"),
        ("169.254.7.7/17", "link-local"),
        ("fe80::/10", "link-local"),
        ("fe80::1/128", "link-local"),
        ("168.63.129.16/32", "metadata service, which returns credentials"),
        ("100.100.100.200/32", "metadata service, which returns credentials"),
        ("fd00:ec2::254/128", "metadata service, which returns credentials"),
        ("999.1.1.1/8", "must be an address range"),
        ("10.0.0.0/33", "must be an address range"),
        ("10.0.0.0/8", ""),
        ("0.0.0.0/0", ""),
        ("fc00::/7", ""),
    ],
)
def test_no_environment_may_ask_for_link_local_addresses(cidr: str, text: str) -> None:
    environment = {"name": "reverse", "egress": [{"cidr": cidr}]}
    body = {**BODY, "spec": {**BODY["spec"], "environment": environment}}
    if not text:
        assert parse(RLJob, body).spec.environment.egress[0].cidr == cidr
        return
    with pytest.raises(InvalidObject, match=rf"^spec\.environment\.egress\[0\]\.cidr: cidr .*{text}"):
        parse(RLJob, body)


TOLERATIONS = {
    "no key": ({"effect": "NoSchedule"}, "a toleration without a key must have operator: Exists"),
    "a value for Exists": ({"key": "a", "operator": "Exists", "value": "b"}, "operator: Exists takes no value"),
    "seconds without an end": ({"key": "a", "tolerationSeconds": 3}, "tolerationSeconds needs effect: NoExecute"),
}


@pytest.mark.parametrize(("toleration", "text"), TOLERATIONS.values(), ids=TOLERATIONS)
def test_a_toleration_that_no_pod_could_have_is_refused(toleration: dict[str, object], text: str) -> None:
    spec = {"model": {"builtin": "tiny"}, "trainer": {"tolerations": [toleration]}}
    with pytest.raises(InvalidObject, match=text):
        parse(ModelPool, {**BODY, "kind": "ModelPool", "spec": spec})


def test_a_pull_secret_is_listed_once() -> None:
    spec = {"model": {"builtin": "tiny"}, "rollout": {"imagePullSecrets": [{"name": "a"}, {"name": "a"}]}}
    with pytest.raises(InvalidObject, match=r"^spec.rollout.imagePullSecrets: 'a' is listed twice$"):
        parse(ModelPool, {**BODY, "kind": "ModelPool", "spec": spec})


@pytest.mark.parametrize(
    ("name", "right"),
    [("max_tokens", "maxTokens"), ("MAXTOKENS", "maxTokens"), ("maxToken", "maxTokens"), ("topk", None), ("", None)],
)
def test_the_nearest_name_is_the_one_that_was_probably_meant(name: str, right: str | None) -> None:
    assert nearest(name, ["maxTokens", "maxTurns", "groupSize"]) == right


def test_no_near_name_gives_no_hint() -> None:
    assert did_you_mean("xyz", ["steps"]) == ""
    assert did_you_mean("step", ["steps"]) == "; did you mean 'steps'?"


def test_names_are_listed_as_people_list_them() -> None:
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"


@pytest.mark.parametrize(
    ("training", "text"),
    [
        (
            {"algorithm": "reinforce++", "maxStaleness": 0},
            "spec.training: reinforce++ normalises rewards over the whole step, but maxStaleness 0 (strict) allows no statistic "
            "over several groups: choose another algorithm, or maxStaleness 1 or more",
        ),
        (
            {"algorithm": "rloo", "clip": {"high": 0.3}},
            "spec.training: rloo has no clip: remove clip, or choose another algorithm; use correction to bound rloo's weights",
        ),
        (
            {"correction": {"type": "masked-token", "floor": 0.5}},
            "spec.training.correction: floor needs type: icepop, the only correction with a lower bound; remove floor, or choose icepop",
        ),
    ],
)
def test_what_an_algorithm_cannot_have_is_refused_in_words_and_by_a_rule(
    training: dict[str, object], text: str
) -> None:
    body = {**BODY, "spec": {**BODY["spec"], "training": {"steps": 3, **training}}}
    with pytest.raises(InvalidObject) as caught:
        parse(RLJob, body)
    assert str(caught.value) == text
    (committed,) = [path for path in CRDS.iterdir() if "rljobs" in path.name]
    assert text.split(": ", 1)[1] in " ".join(committed.read_text(encoding="utf-8").replace("''", "'").split())
