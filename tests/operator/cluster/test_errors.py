"""What an answer means, of the API server or of whoever stands before it."""

import json

import pytest

from marlaas_operator.cluster import Forbidden, Gone, Invalid, NotFound, Terminating, TooMany, Unavailable
from marlaas_operator.cluster.errors import api_error


@pytest.mark.parametrize("status", [401, 408, 421, 425, 499, 500, 503, 520, 526, 599, 999])
def test_an_answer_of_somebody_in_between_may_pass(status: int) -> None:
    error = api_error(status, b"", "cannot get it")
    assert type(error) is Unavailable
    assert str(error).startswith("cannot get it: ")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, Invalid), (403, Forbidden), (404, NotFound), (405, Invalid), (410, Gone), (415, Invalid), (422, Invalid)],
)
def test_what_the_api_server_says_for_good_is_for_good(status: int, kind: type[Exception]) -> None:
    assert type(api_error(status, b"{}", "cannot")) is kind


def test_patience_is_bounded_and_an_end_of_a_namespace_is_no_refusal() -> None:
    patient = api_error(429, b"", "cannot", "7200")
    assert isinstance(patient, TooMany)
    assert patient.retry_after_s == 60.0
    ending = {"message": "being terminated", "details": {"causes": [{"reason": "NamespaceTerminating"}]}}
    assert isinstance(api_error(403, json.dumps(ending).encode(), "cannot"), Terminating)
