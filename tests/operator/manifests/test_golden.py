"""Objects in, manifests out: what the operator makes of a job and of a pool, to be read by people; and what holds of all of them."""

import os

import pytest
import yaml
from tests.operator.manifests.cases import CASES, GOLDEN, beyond, holds_token, manifests, pods

from marlaas_operator.manifests.pods import DESIRED_HASH, MANAGED_BY


@pytest.mark.parametrize("case", CASES)
def test_the_manifests_are_the_golden_ones(case):
    file = GOLDEN / f"{case}.out.yaml"
    found = manifests(case)
    if os.environ.get("MARLAAS_UPDATE_GOLDEN"):
        file.write_text(yaml.safe_dump_all(found, sort_keys=False, width=140))
    assert found == list(yaml.safe_load_all(file.read_text())), "see tests/operator/manifests/cases.py"


def test_there_is_no_golden_file_without_a_case():
    assert sorted(path.name.removesuffix(".out.yaml") for path in GOLDEN.glob("*.out.yaml")) == CASES


@pytest.mark.parametrize("case", CASES)
def test_every_object_is_owned_labelled_and_short_enough_in_every_name_and_every_pod_restricted(case):
    made = manifests(case)
    for manifest in made:
        meta = manifest["metadata"]
        assert meta["labels"][MANAGED_BY] == "marlaas-operator"
        assert [owner["controller"] for owner in meta["ownerReferences"]] == [True]
        assert len(meta["name"]) <= (52 if manifest["kind"] == "StatefulSet" else 63)
        assert all(len(value) <= 63 for value in meta["labels"].values())
        assert manifest["kind"] == "Secret" or DESIRED_HASH in meta["annotations"]
    for _, pod in pods(case):
        assert beyond(pod) == []
        assert not holds_token(pod)
    policies = [m["spec"]["podSelector"]["matchLabels"] for m in made if m["kind"] == "NetworkPolicy"]
    templates = [m["spec"]["template"]["metadata"]["labels"] for m in made if "template" in m.get("spec", {})]
    assert len(policies) == len(templates)
    for labels in templates:
        assert sum(selector.items() <= labels.items() for selector in policies) == 1, "a policy selects its very pods"
