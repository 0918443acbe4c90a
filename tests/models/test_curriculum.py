import string

import pytest

from marlaas.models.curriculum import (
    MAX_LETTERS,
    MAX_OPERAND,
    MIN_LETTERS,
    OPERATORS,
    calculator_task,
    evaluate,
    requested_expression,
    reverse_task,
    tool_reply,
)
from marlaas_api.names import Split

SEEDS = range(400)


def test_a_seed_names_the_same_task_for_ever() -> None:
    assert [reverse_task(Split.TRAIN, seed).word for seed in (0, 1, 2**63 - 1)] == ["ynbi", "szy", "vuez"]
    assert [calculator_task(Split.EVAL, seed).expression for seed in (0, 1, 2**63 - 1)] == ["34*63", "64-61", "30+72"]


def test_held_out_tasks_are_never_trained_on() -> None:
    for draw in (reverse_task, calculator_task):
        trained = {draw(Split.TRAIN, seed).prompt for seed in SEEDS}
        held_out = {draw(Split.EVAL, seed).prompt for seed in SEEDS}
        assert not trained & held_out
        assert len(held_out) > 300


def test_a_word_has_different_letters() -> None:
    words = [reverse_task(Split.TRAIN, seed).word for seed in SEEDS]
    assert {len(word) for word in words} == set(range(MIN_LETTERS, MAX_LETTERS + 1))
    assert all(len(set(word)) == len(word) and set(word) <= set(string.ascii_lowercase) for word in words)


def test_an_expression_is_one_operation_on_small_numbers() -> None:
    expressions = [calculator_task(Split.TRAIN, seed).expression for seed in SEEDS]
    operators = ["".join(filter(OPERATORS.__contains__, expression)) for expression in expressions]
    assert set(operators) == set(OPERATORS)
    for expression, operator in zip(expressions, operators, strict=True):
        assert all(1 <= int(operand) <= MAX_OPERAND for operand in expression.split(operator))


def test_the_formats_are_those_of_the_table() -> None:
    reverse, calculator = reverse_task(Split.TRAIN, 0), calculator_task(Split.TRAIN, 0)
    assert (reverse.prompt, reverse.answer) == (f"reverse: {reverse.word}", reverse.word[::-1])
    assert (calculator.prompt, calculator.call) == (f"{calculator.expression}=?", f"calc: {calculator.expression}")
    assert calculator.answer == tool_reply(calculator.expression)


def test_the_right_call_asks_for_the_expression() -> None:
    for seed in SEEDS:
        task = calculator_task(Split.EVAL, seed)
        assert requested_expression(task.call) == task.expression
        assert requested_expression(task.answer) is None


@pytest.mark.parametrize(
    ("reply", "expression"),
    [
        ("calc: 12+34", "12+34"),
        ("calc:12 + 34 ", "12 + 34"),
        ("Let me see.\ncalc: 1*2\n", "1*2"),
        ("calc: ", ""),
        ("calc 12+34", None),
        ("46", None),
        ("I calc: 1+1", None),
        ("", None),
    ],
)
def test_what_a_reply_asks_the_calculator(reply: str, expression: str | None) -> None:
    assert requested_expression(reply) == expression


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12+34", 46),
        ("12 - 34", -22),
        ("-3*4", -12),
        ("99*99", 9801),
        ("1--1", 2),
        ("12+", None),
        ("1+2+3", None),
        ("2**9", None),
        ("1/2", None),
        ("9999999999+1", None),
        ("__import__('os')", None),
        ("", None),
    ],
)
def test_the_calculator_knows_three_operations_and_no_code(expression: str, value: int | None) -> None:
    assert evaluate(expression) == value
    assert tool_reply(expression) == ("error" if value is None else str(value))
