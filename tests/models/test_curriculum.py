"""The tasks of the builtin curriculum, and the demonstrations of them that the tiny model is trained on."""

import itertools

from marlaas.models.curriculum import calculator_task, evaluate, requested_expression, reverse_task, tool_reply
from marlaas.models.demonstrations import NO_MISTAKES, Mistakes, calculator_demonstration, reverse_demonstration
from marlaas.models.tokenizer import TemplateMessage
from marlaas_api.names import Split

SEEDS = range(400)
NOISY_SEEDS = range(3000)
NOISY = Mistakes(letter=0.25, untooled=0.5, call=0.4, result=0.3)


def test_a_seed_names_the_same_task_for_ever():
    assert [reverse_task(Split.TRAIN, seed).word for seed in (0, 1, 2**63 - 1)] == ["ynbi", "szy", "vuez"]
    assert [calculator_task(Split.EVAL, seed).expression for seed in (0, 1, 2**63 - 1)] == ["34*63", "64-61", "30+72"]


def test_held_out_tasks_are_never_trained_on():
    for draw in (reverse_task, calculator_task):
        trained = {draw(Split.TRAIN, seed).prompt for seed in SEEDS}
        held_out = {draw(Split.EVAL, seed).prompt for seed in SEEDS}
        assert not trained & held_out
        assert len(held_out) > 300


REQUESTED = {
    "calc: 12+34": "12+34",
    "calc:12 + 34 ": "12 + 34",
    "Let me see.\ncalc: 1*2\n": "1*2",
    "calc: ": "",
    **dict.fromkeys(["calc 12+34", "46", "I calc: 1+1", ""]),
}
VALUES = {"12+34": 46, "12 - 34": -22, "-3*4": -12, "99*99": 9801, "1--1": 2}
NO_VALUES = ["12+", "1+2+3", "2**9", "1/2", "9999999999+1", "__import__('os')", ""]


def test_what_a_reply_asks_the_calculator_which_knows_three_operations_and_no_code():
    assert {reply: requested_expression(reply) for reply in REQUESTED} == REQUESTED
    for expression in (*VALUES, *NO_VALUES):
        value = VALUES.get(expression)
        assert evaluate(expression) == value, expression
        assert tool_reply(expression) == ("error" if value is None else str(value))


def test_without_mistakes_every_reply_is_right():
    for seed in range(100):
        word, sum_ = reverse_task(Split.TRAIN, seed), calculator_task(Split.TRAIN, seed)
        said = (("user", word.prompt), ("assistant", word.answer))
        assert reverse_demonstration(seed, NO_MISTAKES) == [TemplateMessage(*one) for one in said]
        asked, told = (("user", sum_.prompt), ("assistant", sum_.call)), ("tool", sum_.answer)
        said = (*asked, told, ("assistant", sum_.answer))
        assert calculator_demonstration(seed, NO_MISTAKES) == [TemplateMessage(*one) for one in said]


def test_mistakes_come_at_their_rates_and_the_tool_tells_what_it_was_asked():
    replies = [(reverse_task(Split.TRAIN, seed).answer, reverse_demonstration(seed, NOISY)[1]) for seed in NOISY_SEEDS]
    letters = [a == b for answer, reply in replies for a, b in zip(answer, reply.content, strict=True)]
    assert abs(sum(letters) / len(letters) - (1 - 0.25 * 25 / 26)) < 0.02
    talks = [calculator_demonstration(seed, NOISY) for seed in NOISY_SEEDS]
    called = [talk for talk in talks if requested_expression(talk[1].content) is not None]
    assert abs(len(called) / len(talks) - 0.5) < 0.03
    last = [talk[-1].content == talk[-2].content for talk in called if len(talk) == 4]
    assert abs(sum(last) / len(last) - (1 - 0.3 * 0.9)) < 0.03
    assert any(talk[2].content == "error" for talk in talks if len(talk) > 2)
    for seed, talk in zip(NOISY_SEEDS, talks, strict=True):
        for asked, told in itertools.pairwise(talk):
            if told.role == "tool":
                assert told.content == tool_reply(requested_expression(asked.content) or "")
        if len(talk) > 4:
            assert talk[3].content == calculator_task(Split.TRAIN, seed).call, "an error is followed by the right call"
