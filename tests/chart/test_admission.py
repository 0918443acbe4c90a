"""Admission in force on a real API server: the operator is held to its own objects, and to locked pods."""

import json
import re
from collections.abc import Iterator
from types import MappingProxyType

import pytest
import yaml
from tests.operator.objects import body, job, namespace, tenant
from tests.tables import data, rows

from marlaas_api.kinds import RLJob, Tenant
from marlaas_api.kinds.problems import InvalidObject, parse
from marlaas_api.kinds.sizes import MAX_ARGS_BYTES, MAX_OBJECT_BYTES, MAX_SPEC_BYTES
from marlaas_e2e.control_plane import ControlPlane
from marlaas_e2e.kubectl import CommandFailed

from .conftest import Document, Helm, Render
from .releases import NAMESPACE, OPERATOR, OURS, Release, deployment, put, secret, wait_for_admission, wait_until

EDITOR = "ed"
RIGHTS = data(__file__, "editor")
(READABLE,) = (rule["resourceNames"] for rule in RIGHTS[0]["rules"] if rule["resources"] == ["secrets"])
MANY = [f"{number}.255.255.255/32" for number in range(100, 164)], "127.255.255.255/32"


@pytest.fixture(scope="module")
def release(control_plane: ControlPlane, helm: Helm, render: Render) -> Iterator[Release]:
    """The chart's objects on a server that other tests share: helm would refuse kinds that it did not install."""
    objects = [each for each in render("default") if "helm.sh/hook" not in each["metadata"].get("annotations", {})]
    for name in (NAMESPACE, "team-a", "team-b"):
        control_plane.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(namespace(name)))
    everything = yaml.safe_dump_all(objects)
    control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=everything)
    release = Release(control_plane, helm)
    wait_for_admission(release)
    yield release
    control_plane.kubectl("delete", "--ignore-not-found", "--wait=false", "-f", "-", stdin=everything)


def test_the_operator_makes_and_replaces_a_credential_of_its_own_without_reading_it(release):
    own = secret("job-sandbox", OURS)
    assert put(release, own) == ""
    assert put(release, {**own, "stringData": {"bus.creds": "renewed"}}) == ""
    assert 'cannot get resource "secrets"' in release.refusal(OPERATOR, "-n", "team-a", "get", "secret", "job-sandbox")
    assert 'cannot list resource "secrets"' in release.refusal(OPERATOR, "get", "secrets", "--all-namespaces")


def test_the_operator_cannot_make_take_over_or_delete_secrets_of_others(release):
    for theirs in (secret("login", {"app": "web"}), secret("registry", {}, NAMESPACE)):
        release.plane.kubectl("apply", "-f", "-", stdin=json.dumps(theirs))
    assert "writes only objects labelled" in put(release, secret("anonymous", {}))
    assert "touches only objects labelled" in put(release, secret("login", OURS))
    assert "writes only objects labelled" in put(release, secret("login", {"app": "web"}))
    assert "touches only objects labelled" in put(release, secret("registry", OURS, NAMESPACE))
    raw = "/api/v1/namespaces/team-a/secrets/login"
    assert "touches only objects labelled" in release.refusal(OPERATOR, "delete", "--raw", raw)
    assert release.plane.kubectl("-n", "team-a", "get", "secret", "login", "-o", "name") == "secret/login\n"


def test_the_charts_own_objects_are_not_the_operators_to_change(release):
    change = ("patch", "deployment", "marlaas-orchestrator", "--type=merge", "--patch", '{"spec": {"replicas": 0}}')
    assert "writes only objects labelled" in release.refusal(OPERATOR, "-n", NAMESPACE, *change)


@pytest.mark.parametrize(("pod", "sentence"), rows(__file__, "loose"))
def test_the_operator_can_make_no_other_pods(release, pod, sentence):
    assert sentence in put(release, deployment(**pod))


def test_the_operator_can_have_no_accounts_token_written_into_a_secret_of_its_own(release):
    """The cluster fills a Secret of this type in; the answer to an empty patch would show it to whoever stole the operator's token."""
    ghost = secret("ghost-sandbox", OURS) | {"type": "kubernetes.io/service-account-token"}
    ghost["metadata"]["annotations"] = {"kubernetes.io/service-account.name": "default"}
    assert "only Secrets of type Opaque" in put(release, ghost)


def test_the_operator_can_open_the_network_of_no_pods_but_its_own(release):
    def policy(selector: Document) -> Document:
        spec = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": [{}]}
        return body("networking.k8s.io/v1", "NetworkPolicy", "team-a", "greedy-sandbox", labels=OURS) | {"spec": spec}

    expressions = [{"key": "app", "operator": "Exists"}]
    for selector in ({}, {"matchLabels": {"app": "bank"}}, {"matchExpressions": expressions}):
        assert "select the pods of one job or pool" in put(release, policy(selector))
    assert put(release, policy({"matchLabels": {"marlaas.dev/job-uid": "u1"}})) == ""


@pytest.mark.parametrize("place", ["kube-system", "kube-public"])
def test_the_operator_makes_nothing_in_the_clusters_own_namespaces(release, place):
    """A pod there could mount the Secrets that lie there."""
    pod = deployment()
    pod["metadata"]["namespace"] = place
    for made in (pod, secret("own-sandbox", OURS, place)):
        assert "in the namespaces kube-" in put(release, made)


def test_others_are_not_bothered_by_these_policies(release):
    release.plane.kubectl("apply", "-f", "-", stdin=json.dumps(secret("others", {})))
    loose = {**deployment(automountServiceAccountToken=True), "metadata": {"name": "web", "namespace": "team-a"}}
    release.plane.kubectl("apply", "-f", "-", stdin=json.dumps(loose))


@pytest.fixture(scope="module")
def editor(release: Release) -> Release:
    """`ed` may edit RLJobs of team-a and get the Secrets READABLE; the policies about authors are in force."""
    release.plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(RIGHTS))
    named, rows = names(["login"]), [{"name": "rows", "configMap": {"name": "login"}}]
    for closed in ({"secretRefs": named}, {"imagePullSecrets": named}, {"volumes": rows}):
        wait_until(lambda fields=closed: "may not be read" in create(release, **fields), f"{closed} is refused")
    wait_until(lambda: " is not open " in create(release, **egress("10.0.0.1/32")), "egress is refused")
    wait_until(lambda: create(release, secretRefs=names(READABLE)) == "", "the editor may edit")
    return release


def names(secrets: list[str]) -> list[dict[str, str]]:
    return [{"name": name} for name in secrets]


def egress(*cidrs: str) -> Document:
    return {"egress": [{"cidr": cidr} for cidr in cidrs]}


def create(release: Release, export: Document = MappingProxyType({}), **environment: object) -> str:
    """What the API server answers the editor who creates a job; a dry run."""
    where = {"image": "x:1", "entrypoint": ["x"], **environment}
    made = job("team-a", "sums", "tiny", environment=where, export={**export})
    return release.refusal(EDITOR, "create", "--dry-run=server", "-f", "-", stdin=json.dumps(made))


def exported(secrets: list[str]) -> Document:
    """Eight of them for trackers, the last ones for hub and bucket, the others for webhooks."""
    webhooks = [{"webhook": {"secretRef": {"name": name, "key": "url"}}} for name in secrets[8:-2]]
    hub = {"repo": "a/b", "tokenSecretRef": {"name": secrets[-2], "key": "token"}}
    bucket = {"url": "s3://a/b", "secretRef": {"name": secrets[-1]}}
    return {"secretRefs": names(secrets[:8]), "notify": webhooks, "hub": hub, "s3": bucket}


@pytest.mark.parametrize("field", ["environment.secretRefs", "environment.imagePullSecrets", "export"])
@pytest.mark.parametrize("at", [0, 15])
def test_an_author_names_no_secret_that_they_may_not_read(editor, field, at):
    named = [*READABLE[:at], "login", *READABLE[at + 1 :]]
    sentence = f"{field}: Secret login may not be read by ed in namespace team-a; remove it from the job"
    given = exported([*READABLE[-2:], *named]) if field == "export" else names(named)
    assert sentence in create(editor, **{field.rpartition(".")[2]: given})


@pytest.mark.parametrize("at", [0, 7])
def test_an_author_names_no_volume_that_they_may_not_read(editor, at):
    kinds = {"configMap": {"name": "login"}, "pvc": {"claimName": "login"}}
    for kind, (field, closed) in zip(("ConfigMap", "PersistentVolumeClaim"), kinds.items(), strict=True):
        named = [{"name": f"v{number}", field: dict.fromkeys(closed, "open")} for number in range(8)]
        assert create(editor, volumes=named) == ""
        named[at][field] = closed
        assert f"environment.volumes: {kind} login may not be read by ed" in create(editor, volumes=named)
    for claim, words in (("open", "export.volume: PersistentVolumeClaim open may not be written by ed"), ("own", "")):
        answer = create(editor, {"volume": {"claimName": claim, "path": "a"}})
        assert words in answer if words else answer == ""


def test_an_author_names_as_many_secrets_as_a_job_may_have(editor):
    every = {"secretRefs": names(READABLE), "imagePullSecrets": names(READABLE)}
    assert create(editor, exported([*READABLE, *READABLE[:2]]), **every) == ""


@pytest.mark.parametrize(("cidrs", "refused"), [*rows(__file__, "egress"), MANY])
def test_a_job_opens_nothing_that_the_installation_closes(editor, cidrs, refused):
    sentence = f"egress: {refused} is not open to jobs; remove it, or ask the platform team"
    for given in (egress(*cidrs), {"export": egress(*cidrs)})[: 1 if len(cidrs) > 16 else 2]:
        answer = create(editor, **given)
        assert sentence in answer if refused else answer == ""


def _largest(**args: object) -> Document:
    made = job("team-a", "large", "tiny", environment={"name": "reverse", "args": args})
    made["metadata"]["annotations"] = {}
    return made


def test_objects_that_are_too_large_are_refused_with_their_size_by_the_server_and_by_the_kinds(release):
    """Also an object of many small values, over which a rule in CEL would need seconds."""
    fits, many = _largest(text="ü" * 32_000), _largest(a=[[1]] * 18_000)
    spec, whole = _largest(), _largest(text="x" * 64_000)
    spec["spec"]["environment"] = {"image": "x", "entrypoint": ["y" * 4000] * 30}
    whole["metadata"]["annotations"] = {"note": "y" * 199_000}
    noted = tenant("acme", "team-a")
    noted["metadata"]["annotations"] = {"note": "y" * 262_120}

    def refusal(made: Document) -> str:
        try:
            release.plane.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(made))
        except CommandFailed as error:
            return str(error)
        return ""

    wait_until(lambda: "bytes as text" in refusal(many), "the sizes are in force")
    assert refusal(fits) == ""
    assert parse(RLJob, fits)
    for made, kind, words in (
        (_largest(text="ü" * 33_000), RLJob, f"args has 66011 bytes as text, at most {MAX_ARGS_BYTES}"),
        (many, RLJob, "args has 90006 bytes as text"),
        (spec, RLJob, f"at most {MAX_SPEC_BYTES} are allowed"),
        (whole, RLJob, f"at most {MAX_OBJECT_BYTES} are allowed"),
        (noted, Tenant, f"at most {MAX_OBJECT_BYTES} are allowed"),
    ):
        assert words in refusal(made)
        with pytest.raises(InvalidObject, match=re.escape(words)):
            parse(kind, made)
