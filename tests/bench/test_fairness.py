"""Figures of `bench fairness`, by hand; and the room in an engine goes to tenants by weight, although two of them come and go."""

from statistics import fmean

import pytest
from bench.fairness import TENANTS, Log, Window, simulate, windows
from bench.multitenant_figures import jain

SECONDS = 240.0
WEIGHTS = {tenant.name: tenant.weight for tenant in TENANTS}


def test_windows_count_tenants_that_had_queued_requests_throughout():
    served = [(1.0, "a", 10), (59.0, "b", 30), (61.0, "a", 20), (119.0, "b", 80), (10.0, "c", 5)]
    log = Log(served, {"c": [(0.0, 5.0), (70.0, 80.0)], "b": [(130.0, 140.0)]})
    first, second = windows(log, {"a": 1.0, "b": 2.0, "c": 1.0}, 125.0)
    assert first.services == {"a": 10.0, "b": 15.0}
    assert second.services == {"a": 20.0, "b": 40.0}
    assert (first.difference, second.difference) == (5.0, 20.0)
    assert windows(log, {"a": 1.0, "c": 1.0}, 125.0) == [], "one tenant alone is compared with nobody"


@pytest.fixture(scope="module")
def logs() -> tuple[Log, Log]:
    """By weight, and first come, first served."""
    return simulate(True, 0, SECONDS), simulate(False, 0, SECONDS)


def compared(log: Log) -> list[Window]:
    return windows(log, WEIGHTS, SECONDS)


def test_shares_follow_the_weights_and_differ_by_less_than_half_of_first_come_first_served(logs):
    fair, first_come = logs
    assert min(jain(list(window.services.values())) for window in compared(fair)) >= 0.95
    worst = [max(window.difference for window in compared(log)) for log in logs]
    assert worst[0] <= 0.5 * worst[1]
    assert fmean(jain(list(window.services.values())) for window in compared(first_come)) < 0.8


def test_fairness_costs_no_throughput(logs):
    fair, first_come = (sum(tokens for _, _, tokens in log.served) for log in logs)
    assert fair >= 0.97 * first_come
