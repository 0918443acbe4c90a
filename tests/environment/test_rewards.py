"""Rubrics: weighted sums of named parts, by hand-worked numbers; answers found in replies."""

import math

import pytest
from tests.tables import rows

from marlaas.environment import Reply
from marlaas.envs.extraction import extractor
from marlaas.rewards import Rubric, answer_reward, format_reward, length_penalty
from marlaas_api.errors import InvalidInput


def half(reply):
    return 0.5


def same(reply, truth, factor=1.0):
    return factor * (reply.text == truth)


def broken(reply):
    return math.nan


def test_a_reward_is_the_weighted_sum_and_every_part_is_logged():
    score = Rubric((2.0, same), (-0.5, half), (0, len_of_text)).score(reply=Reply("abc"), truth="abc")
    assert score.reward == 2.0 * 1.0 - 0.5 * 0.5
    assert score.metrics == {"same": 1.0, "half": 0.5, "len_of_text": 3.0}


def len_of_text(*, reply):
    return len(reply.text)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rubric(), "at least one part"),
        (lambda: Rubric((1, half), (2, half)), "two parts named 'half'"),
        (lambda: Rubric((1, lambda reply: 1.0)), "the function needs a name"),
        (lambda: Rubric(("1", half)), "a weight is a finite number"),  # type: ignore[arg-type]
        (lambda: Rubric((math.inf, half)), "a weight is a finite number"),
        (
            lambda: Rubric((1, same)).score(reply=Reply("a"), truths="a"),
            "'same' needs 'truth', .*; did you mean 'truths'",
        ),
        (lambda: Rubric((1, broken)).score(reply=Reply("a")), "'broken' returned nan"),
        (lambda: extractor("boxd"), "expected one of last_number, boxed, tag, whole, regex"),
        (lambda: extractor("regex"), "needs the argument 'pattern'"),
        (lambda: extractor("regex", "("), "not a regular expression"),
        (lambda: extractor("tag", "x"), "`pattern` applies only to answer: regex"),
        (lambda: format_reward("("), "not a regular expression"),
        (lambda: length_penalty(10, 10), "expected 0 <= free_tokens < max_tokens"),
        (lambda: answer_reward("box"), "did you mean 'boxed'"),
    ],
)
def test_rubrics_and_extractions_that_cannot_be(make, words):
    with pytest.raises(InvalidInput, match=words):
        make()


def test_lengths_forms_and_answers_are_paid():
    """The length penalty is DAPO's. Answers are compared as numbers when both are."""
    penalty = length_penalty(100, 200)
    assert [penalty(Reply("", num_tokens=n)) for n in (0, 100, 125, 200, 999)] == [0.0, 0.0, -0.25, -1.0, -1.0]
    form = format_reward(r"<think>.*</think>\s*<answer>.*</answer>")
    assert form(Reply(" <think>a\nb</think>\n<answer>c</answer>\n")) == 1.0
    assert form(Reply("well <think></think><answer></answer>")) == form(Reply("<answer>c</answer>")) == 0.0
    pairs = {"so 7.0": 7, "1,000": "1000", "8": 7, "none": 7, "it is 0.50": 0.5}
    assert [answer_reward("last_number")(Reply(text), truth) for text, truth in pairs.items()] == [1, 1, 0, 0, 1]
    assert answer_reward("whole")(Reply("Paris"), "Paris") == 1.0


@pytest.mark.parametrize(("kind", "reply", "answer"), rows(__file__, "answers"))
def test_answers_are_found(kind, reply, answer):
    is_name = kind in ("last_number", "boxed", "tag", "whole")
    assert (extractor(kind) if is_name else extractor("regex", kind))(reply) == answer
