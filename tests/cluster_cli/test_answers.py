"""What kubectl writes to standard error, seen on real servers, and what people are told."""

from collections.abc import Callable
from pathlib import Path

import pytest

from marlaas.cluster.errors import (
    AccessDenied,
    ClusterSilent,
    CommandFailed,
    KindsMissing,
    KubectlMissing,
    NoCluster,
    NotLoggedIn,
    ObjectMissing,
    Refused,
    error_of,
)
from marlaas.cluster.kubectl import ClusterTarget, Kubectl
from marlaas.cluster.submission import loc_of

SEEN = {
    'error: the server doesn\'t have a resource type "rljobs"\n': (KindsMissing, "install MARLaaS (helm"),
    'error: resource mapping not found for name: "q" namespace: "a" from "STDIN": no matches for kind "RLJob" in version '
    '"marlaas.dev/v1alpha1"\nensure CRDs are installed first\n': (KindsMissing, "does not have MARLaaS's CRDs"),
    "The connection to the server localhost:8080 was refused - did you specify the right host or port?\n": (
        NoCluster,
        "no cluster is configured: there is no kubeconfig, or it names no cluster; see `kubectl config get-contexts`, then give --context or --kubeconfig",
    ),
    "error: context was not found for specified context: nope\n": (NoCluster, "nope"),
    "Unable to connect to the server: tls: failed to verify certificate: x509: certificate signed by unknown authority\n": (
        NoCluster,
        "x509: certificate signed by unknown authority; see `kubectl config get-contexts`",
    ),
    "error: stat /nowhere/config: no such file or directory\n": (NoCluster, "/nowhere/config"),
    "The connection to the server 127.0.0.1:41623 was refused - did you specify the right host or port?\n": (
        ClusterSilent,
        "127.0.0.1:41623 was refused",
    ),
    'E1121 16:27:45.781347   29813 memcache.go:265] "Unhandled Error" err="..."\n'
    "Unable to connect to the server: dial tcp 10.0.0.1:443: i/o timeout\n": (
        ClusterSilent,
        "the cluster does not answer: Unable to connect to the server: dial tcp 10.0.0.1:443: i/o timeout",
    ),
    'error: error validating "STDIN": error validating data: failed to download openapi: Get "https://127.0.0.1:1/openapi/v2": '
    "dial tcp 127.0.0.1:1: connect: connection refused; if you choose to ignore these errors, turn validation off with "
    "--validate=false\n": (
        ClusterSilent,
        'the cluster does not answer: Get "https://127.0.0.1:1/openapi/v2": dial tcp 127.0.0.1:1: connect: connection refused',
    ),
    "error: You must be logged in to the server (Unauthorized)\n": (NotLoggedIn, "not logged in"),
    'Error from server (Forbidden): rljobs.marlaas.dev "x" is forbidden: User "ann" cannot get resource\n': (
        AccessDenied,
        'not allowed: rljobs.marlaas.dev "x" is forbidden: User "ann" cannot get resource; ask the platform team',
    ),
    'Error from server (NotFound): rljobs.marlaas.dev "x" not found\n': (
        ObjectMissing,
        'rljobs.marlaas.dev "x" not found',
    ),
    "error: something new\n": (CommandFailed, "something new"),
    "": (CommandFailed, "without an error text"),
}


@pytest.mark.parametrize("stderr", SEEN)
def test_what_kubectl_says_becomes_a_sentence_for_people(stderr: str) -> None:
    kind, words = SEEN[stderr]
    error = error_of(stderr)
    assert type(error) is kind
    assert words in str(error)


REFUSALS = {
    'The RLJob "reverse" is invalid: spec.training.steps: Invalid value: 1: may be raised but not lowered\n': (
        ("spec.training.steps", "Invalid value: 1: may be raised but not lowered"),
    ),
    'The RLJob "reverse" is invalid: \n* spec.training.steps: Invalid value: 20: may be raised\n'
    "* spec.rollout: Invalid value: cannot change\n": (
        ("spec.training.steps", "Invalid value: 20: may be raised"),
        ("spec.rollout", "Invalid value: cannot change"),
    ),
    'The ModelPool "p" is invalid: <nil>: Invalid value: give exactly one of builtin, path, pvc and hub\n': (
        ("<nil>", "Invalid value: give exactly one of builtin, path, pvc and hub"),
    ),
    "Error from server: failed to create typed patch object (team-a/q; marlaas.dev/v1alpha1, Kind=RLJob): .spec.extra: field not "
    "declared in schema\n": (("spec.extra", "field not declared in schema"),),
}


@pytest.mark.parametrize("stderr", REFUSALS)
def test_a_refusal_names_every_field(stderr: str) -> None:
    error = error_of(stderr)
    assert isinstance(error, Refused)
    assert error.causes == REFUSALS[stderr]


@pytest.mark.parametrize(
    ("field", "loc"),
    [
        ("spec.agents[1].adapter.rank", ("spec", "agents", 1, "adapter", "rank")),
        ("spec.environment.args[a.b]", ("spec", "environment", "args", "a.b")),
        ("<nil>", ()),
    ],
)
def test_a_field_of_the_api_server_is_a_place_in_the_manifest(field: str, loc: tuple[str | int, ...]) -> None:
    assert loc_of(field) == loc


def test_without_kubectl_people_are_told_to_install_it() -> None:
    with pytest.raises(KubectlMissing, match="kubectl-of-nobody is not on PATH"):
        Kubectl(program="kubectl-of-nobody").get("rljobs", "x")


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """A program that stands in for kubectl: a shell script."""

    def write(script: str) -> str:
        path = tmp_path / "kubectl"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return write


def test_the_targets_flags_reach_kubectl(program: Callable[[str], str]) -> None:
    echo = program('printf \'{"said": "%s"}\' "$*"')
    kubectl = Kubectl(ClusterTarget("c", "n", "k"), echo)
    assert kubectl.get("rljobs", "x")["said"] == (
        "get rljobs x --output=json --request-timeout=30s --context=c --namespace=n --kubeconfig=k"
    )


def test_an_answer_that_is_no_json_is_an_error_of_ours(program: Callable[[str], str]) -> None:
    with pytest.raises(CommandFailed, match="not JSON"):
        Kubectl(program=program("echo hello")).get("rljobs", "x")
