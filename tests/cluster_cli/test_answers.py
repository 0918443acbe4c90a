"""What kubectl writes to standard error, seen on real servers, and what people are told."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tests.tables import rows

from marlaas.cluster import errors
from marlaas.cluster.errors import Refused, error_of
from marlaas.cluster.kubectl import ClusterTarget, Kubectl
from marlaas.cluster.submission import loc_of

SEEN = yaml.safe_load(Path(__file__).with_name("answers.yaml").read_text())


@pytest.mark.parametrize("answer", SEEN, ids=[f"{answer['error']}-{at}" for at, answer in enumerate(SEEN)])
def test_what_kubectl_says_becomes_a_sentence_for_people(answer):
    error = error_of(answer["stderr"])
    assert type(error) is getattr(errors, answer["error"])
    assert answer["says"] in str(error)


@pytest.mark.parametrize(("stderr", "causes"), rows(__file__, "refusals"))
def test_a_refusal_names_every_field(stderr, causes):
    error = error_of(stderr)
    assert isinstance(error, Refused)
    assert [list(cause) for cause in error.causes] == causes


@pytest.mark.parametrize(("field", "loc"), rows(__file__, "fields"))
def test_a_field_of_the_api_server_is_a_place_in_the_manifest(field, loc):
    assert loc_of(field) == tuple(loc)


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """A program that stands in for kubectl: a shell script."""

    def write(script: str) -> str:
        path = tmp_path / "kubectl"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return write


def test_the_targets_flags_reach_kubectl(program):
    echo = program('printf \'{"said": "%s"}\' "$*"')
    kubectl = Kubectl(ClusterTarget("c", "n", "k"), echo)
    flags = "--output=json --request-timeout=30s --context=c --namespace=n --kubeconfig=k"
    assert kubectl.get("rljobs", "x")["said"] == f"get rljobs x {flags}"
