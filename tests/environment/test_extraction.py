import pytest

from marlaas.envs.extraction import extractor
from marlaas_api.errors import InvalidInput


@pytest.mark.parametrize(
    ("kind", "reply", "answer"),
    [
        ("last_number", "4 + 3 = 7", "7"),
        ("last_number", "so it is -12.", "-12"),
        ("last_number", "10-5", "5"),
        ("last_number", "1,234.50", "1234.50"),
        ("last_number", "42.0", "42"),
        ("last_number", "none", None),
        ("last_number", "8, I think", "8"),
        ("boxed", r"thus \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1} or \boxed{2}", "2"),
        ("boxed", r"\boxed{never closed", None),
        ("boxed", "2", None),
        ("tag", "<answer>a</answer> no, <answer>\nb </answer>", "b"),
        ("tag", "<answer>open", None),
        ("whole", "  yes \n", "yes"),
        ("whole", "  ", None),
    ],
)
def test_answers_are_found(kind: str, reply: str, answer: str | None) -> None:
    assert extractor(kind)(reply) == answer


def test_a_regular_expression_gives_its_first_group_of_the_last_match() -> None:
    assert extractor("regex", r"is (\w+)")("is a, is b") == "b"
    assert extractor("regex", r"\d+")("1 22") == "22"
    assert extractor("regex", r"x(\d)?")("x") is None


@pytest.mark.parametrize(
    ("kind", "pattern", "words"),
    [
        ("boxd", None, "expected one of last_number, boxed, tag, whole, regex"),
        ("regex", None, "needs the argument 'pattern'"),
        ("regex", "(", "not a regular expression"),
        ("tag", "x", "`pattern` applies only to answer: regex"),
    ],
)
def test_wrong_extractions_are_refused(kind: str, pattern: str | None, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        extractor(kind, pattern)
