"""Admission over simulated time: jobs arrive, run for a while, and end. Shares at saturation, and a tenant with a hundred jobs."""

import random

from tests.orchestrator.demands import TICK_S, Simulation


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


def saturated(total: int, run_s: float, preempts: bool = True, seed: int = 0) -> Simulation:
    """Four tenants of weights 1, 1, 2 and 4, each with more jobs than fit, submitted in a random order."""
    draw, weights = random.Random(seed), {"a": 1.0, "b": 1.0, "c": 2.0, "d": 4.0}
    found = Simulation(total, weights, preempts)
    for number in range(120):
        found.arrive_at(draw.uniform(0, 600), f"j{number:03d}", draw.choice("abcd"), draw.uniform(0.5, 1.5) * run_s)
    for number in range(120):
        found.arrive_at(0.0, f"k{number:03d}", "abcd"[number % 4], draw.uniform(0.5, 1.5) * run_s)
    return found


def test_at_saturation_shares_follow_the_weights():
    for total, preempts in ((8, True), (16, False)):
        found = saturated(total, 60.0 * total, preempts)
        found.run_until(800.0)
        before = dict(found.held_s)
        found.run_until(1900.0)
        gained = [(found.held_s[one] - before[one]) / weight for one, weight in found.weights.items()]
        assert all(any(job.tenant == one for job in found.waiting.values()) for one in found.weights), "saturated"
        assert jain(gained) >= 0.95, (total, preempts, gained)


def test_a_hundred_jobs_at_once_delay_another_tenants_job_by_no_more_than_a_minimum_run_time():
    found = Simulation(16, {})
    for number in range(100):
        found.arrive_at(0.0, f"many{number:03d}", "attacker", 3600.0)
    found.arrive_at(10.0, "early", "victim", 600.0)
    found.arrive_at(500.0, "late", "victim", 600.0)
    found.run_until(700.0)
    assert found.started_at["early"] - 10.0 <= 60.0 + TICK_S
    assert found.started_at["late"] - 500.0 <= TICK_S


def test_a_tenant_that_comes_and_goes_with_short_jobs_gains_nothing():
    """Its share is zero whenever it comes; its past use and its entries are not."""
    found = Simulation(1, {}, preempts=False)
    for number in range(200):
        found.arrive_at(number * 20.0, f"short{number:03d}", "comes-and-goes", 10.0)
        found.arrive_at(number * 20.0, f"steady{number:03d}", "steady", 10.0)
    found.run_until(2000.0)
    held = found.held_s
    assert jain([held["comes-and-goes"], held["steady"]]) >= 0.99
