"""What others wrote is shown and never obeyed."""

import pytest

from marlaas_api.last_words import visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcode 漢字 😀\n\tand lines", "plain, ünïcode 漢字 😀\n\tand lines"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("\x9b31mred", r"\x9b31mred"),
        ("over\rwritten\x08\x00", r"over\x0dwritten\x08\x00"),
        ("a\u202eb\u2066c\u2028d", r"a\u202eb\u2066c\u2028d"),
    ],
)
def test_what_a_terminal_would_act_on_is_written_out(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible(shown) == shown
