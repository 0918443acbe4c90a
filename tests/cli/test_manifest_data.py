"""What is said of a job's data order."""

from collections.abc import Callable

import pytest

Complaints = Callable[..., list[str]]


def data(text: str) -> tuple[str, str]:
    return "training: {steps: 3}", f"training: {{steps: 3, data: {text}}}"


@pytest.mark.parametrize(
    "text",
    ["{}", "{tasks: 5}", "{tasks: 5, order: shuffled}", "{tasks: 5, skip: {}}", "{tasks: 1, skip: {maxShare: 0.9}}"],
)
def test_right_data_orders(complaints: Complaints, text: str) -> None:
    assert complaints(data(text)) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "{skip: {}}",
            "spec.training.data: skip needs tasks: an endless stream contains every task once, so none can be skipped",
        ),
        (
            "{order: shuffled}",
            "spec.training.data: order: shuffled needs tasks: an endless stream has no order to shuffle",
        ),
        ("{tasks: 0}", "spec.training.data.tasks: must be at least 1, found 0"),
        ("{tasks: 4, skip: {maxShare: 1}}", "spec.training.data.skip.maxShare: must be less than 1, found 1"),
        (
            "{tasks: 4, order: shufled}",
            "spec.training.data.order: must be one of sequential, shuffled; found 'shufled'; did you mean 'shuffled'?",
        ),
        ("{tasks: 4, skip: {pases: 2}}", "spec.training.data.skip.pases: unknown field; did you mean 'passes'?"),
    ],
)
def test_wrong_data_orders_are_told_with_their_place(complaints: Complaints, text: str, said: str) -> None:
    assert complaints(data(text)) == [f"job.yaml:21: {said}"]
