"""What an answer means, of the API server or of whoever stands before it."""

import json

import pytest

from marlaas_operator.cluster import Forbidden, Gone, Invalid, NotFound, Terminating, TooMany, Unavailable
from marlaas_operator.cluster.errors import api_error

BETWEEN = [(status, Unavailable) for status in (401, 408, 421, 425, 499, 500, 503, 520, 526, 599, 999)]
"""Answers of a proxy or a gateway; they may pass."""
FOR_GOOD = [
    (400, Invalid),
    (403, Forbidden),
    (404, NotFound),
    (405, Invalid),
    (410, Gone),
    (415, Invalid),
    (422, Invalid),
]


@pytest.mark.parametrize(("status", "kind"), [*BETWEEN, *FOR_GOOD])
def test_the_status_of_an_answer_says_whether_it_may_pass(status, kind):
    error = api_error(status, b"{}", "cannot get it")
    assert type(error) is kind
    assert str(error).startswith("cannot get it: ")


def test_patience_is_bounded_and_an_end_of_a_namespace_is_no_refusal():
    patient = api_error(429, b"", "cannot", "7200")
    assert isinstance(patient, TooMany)
    assert patient.retry_after_s == 60.0
    ending = {"message": "being terminated", "details": {"causes": [{"reason": "NamespaceTerminating"}]}}
    assert isinstance(api_error(403, json.dumps(ending).encode(), "cannot"), Terminating)
