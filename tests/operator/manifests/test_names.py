"""Names that always fit, and never collide by being cut."""

import pytest

from marlaas_operator.manifests.pods import sandbox_name, stamped, workers_name


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
