import pytest

from marlaas_api.kinds import Tenant
from marlaas_api.kinds.fields import nearest
from marlaas_api.kinds.problems import InvalidObject, parse
from marlaas_api.numeric import quantity

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
    ("name", "right"),
    [("max_tokens", "maxTokens"), ("MAXTOKENS", "maxTokens"), ("maxToken", "maxTokens"), ("topk", None), ("", None)],
)
def test_the_nearest_name_is_the_one_that_was_probably_meant(name: str, right: str | None) -> None:
    assert nearest(name, ["maxTokens", "maxTurns", "groupSize"]) == right
