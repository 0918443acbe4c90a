import pytest
from tests.tables import rows

from marlaas_api.last_words import START_MARK, last_line, last_words, visible


@pytest.mark.parametrize(("log", "words"), rows(__file__, "last_words"))
def test_the_error_that_ended_a_process_is_told_in_its_own_words(log, words):
    assert last_words(log) == words


def test_the_last_line_is_told_without_its_time_and_source():
    assert last_line(f"{START_MARK} x\n2026-11-21T09:55:14.123Z INFO rollout-0 marlaas_worker: loading\n") == "loading"
    assert last_line(f"{START_MARK} x\n2026-11-21T09:55:14.123Z INFO x: loading\n{START_MARK} x\n") == ""


@pytest.mark.parametrize(("text", "shown"), rows(__file__, "visible"))
def test_what_a_terminal_would_act_on_is_written_out(text, shown):
    assert visible(text) == shown
    assert visible(shown) == shown
