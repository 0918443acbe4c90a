import itertools

from marlaas.models.curriculum import calculator_task, requested_expression, reverse_task, tool_reply
from marlaas.models.demonstrations import NO_MISTAKES, Mistakes, calculator_demonstration, reverse_demonstration
from marlaas.models.tokenizer import TemplateMessage
from marlaas_api.names import Split

SEEDS = range(3000)
NOISY = Mistakes(letter=0.25, untooled=0.5, call=0.4, result=0.3)


def test_without_mistakes_every_reply_is_right() -> None:
    for seed in range(100):
        word, sum_ = reverse_task(Split.TRAIN, seed), calculator_task(Split.TRAIN, seed)
        assert reverse_demonstration(seed, NO_MISTAKES) == [
            TemplateMessage("user", word.prompt),
            TemplateMessage("assistant", word.answer),
        ]
        assert calculator_demonstration(seed, NO_MISTAKES) == [
            TemplateMessage("user", sum_.prompt),
            TemplateMessage("assistant", sum_.call),
            TemplateMessage("tool", sum_.answer),
            TemplateMessage("assistant", sum_.answer),
        ]


def test_a_seed_names_the_same_demonstration() -> None:
    for demonstrate in (reverse_demonstration, calculator_demonstration):
        assert [demonstrate(seed, NOISY) for seed in SEEDS[:50]] == [demonstrate(seed, NOISY) for seed in SEEDS[:50]]


def test_mistakes_come_at_their_rates() -> None:
    replies = [
        (reverse_task(Split.TRAIN, seed).answer, reverse_demonstration(seed, NOISY)[1].content) for seed in SEEDS
    ]
    letters = [a == b for answer, reply in replies for a, b in zip(answer, reply, strict=True)]
    assert abs(sum(letters) / len(letters) - (1 - 0.25 * 25 / 26)) < 0.02
    calculations = [calculator_demonstration(seed, NOISY) for seed in SEEDS]
    called = [talk for talk in calculations if requested_expression(talk[1].content) is not None]
    assert abs(len(called) / len(calculations) - 0.5) < 0.03
    last = [talk[-1].content == talk[-2].content for talk in called if len(talk) == 4]
    assert abs(sum(last) / len(last) - (1 - 0.3 * 0.9)) < 0.03


def test_the_tool_tells_what_it_was_asked_and_an_error_is_followed_by_the_right_call() -> None:
    talks = [calculator_demonstration(seed, NOISY) for seed in SEEDS]
    assert any(talk[2].content == "error" for talk in talks if len(talk) > 2)
    for seed, talk in zip(SEEDS, talks, strict=True):
        for asked, told in itertools.pairwise(talk):
            if told.role == "tool":
                assert told.content == tool_reply(requested_expression(asked.content) or "")
        if len(talk) > 4:
            assert talk[3].content == calculator_task(Split.TRAIN, seed).call
