"""Marks of a tenant's total usage: one per hour, later one per day."""

import itertools
import math
from datetime import UTC, datetime

import pytest

from marlaas_api.errors import InvalidInput
from marlaas_api.messages import UsageAmounts
from marlaas_api.usage_objects import HOUR_S, mark_before, marks_of, next_mark_s, usage_status, used_between, with_mark

START = datetime(2026, 11, 1, 10, 20, tzinfo=UTC).timestamp()


def total(tokens: int) -> UsageAmounts:
    return UsageAmounts(generated_tokens=tokens, trained_tokens=tokens)


def test_an_hour_has_one_mark_the_first():
    data = with_mark({}, total(5), START)
    assert with_mark(data, total(7), START + 60) == data
    later = with_mark(data, total(7), START + 2400)
    assert list(later) == ["2026-11-01T10Z", "2026-11-01T11Z"]
    assert [next_mark_s(START), next_mark_s(START + 2400)] == [2400, HOUR_S]
    assert [(mark.at, mark.amounts.trained_tokens) for mark in marks_of(later)] == [(START, 5), (START + 2400, 7)]


def test_usage_in_a_status_is_json_whatever_was_recorded():
    """The API server refuses a status with infinity, so that nothing of the job would be shown any more."""
    endless = UsageAmounts(generated_tokens=5, sandbox_s=math.inf, engine_s=math.nan, trainer_s=1.26)
    assert usage_status(endless) == {"generatedTokens": 5, "trainerSeconds": 1.3}


def test_marks_are_hourly_for_eight_days_then_daily_for_400():
    data: dict[str, str] = {}
    midnight = START - 10 * HOUR_S
    hours = [*range(0, 410 * 24, 12), *range(410 * 24, 420 * 24)]
    for hour in hours:
        data = with_mark(data, total(hour), midnight + hour * HOUR_S)
    now = midnight + hours[-1] * HOUR_S
    ages = [round((now - mark.at) / HOUR_S) for mark in marks_of(data)]
    assert ages[-192:] == list(range(191, -1, -1))
    older = ages[:-192]
    assert 399 * 24 <= older[0] <= 400 * 24
    assert {before - after for before, after in itertools.pairwise(older)} == {24}


def test_a_key_that_is_not_ours_is_kept_and_a_mark_that_cannot_be_read_is_named():
    data = with_mark({"note": "x"}, total(1), START)
    assert data["note"] == "x"
    with pytest.raises(InvalidInput, match="usage mark 'note' cannot be read"):
        marks_of(data)


def test_usage_between_two_totals_adds_up_although_open_tokens_found_a_use():
    first = UsageAmounts(generated_tokens=100, trained_tokens=60, open_tokens=40, engine_s=2.5, stored_bytes=9)
    last = UsageAmounts(generated_tokens=130, trained_tokens=120, open_tokens=10, engine_s=4.0, stored_bytes=5)
    found = used_between(first, last)
    assert (found.generated_tokens, found.trained_tokens, found.open_tokens) == (30, 60, -30)
    assert (found.engine_s, found.stored_bytes) == (1.5, 5)


def test_the_last_mark_before_a_time_counts_also_at_its_very_time():
    marks = marks_of(with_mark(with_mark({}, total(1), START), total(2), START + HOUR_S))
    assert mark_before(marks, START - 1) is None
    assert mark_before(marks, START + HOUR_S - 1) == marks[0]
    assert mark_before(marks, START + HOUR_S) == marks[1]
