"""Shares by weight on the real engine, from raw events by hand; and the order of requests that are first come, first served."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from bench import changed_run, multitenant_shares
from bench.fairness import Log, windows
from bench.multitenant_figures import Events, load
from bench.multitenant_shares import log_of, targets
from tests.bench.raw_events import turn, write_job

from marlaas_worker.rollout.engine_meter import Account
from marlaas_worker.rollout.supervised_engine import RequestLimiter

WEIGHTS = {"team-0": 1.0, "team-1": 4.0}


@pytest.fixture
def events(tmp_path: Path) -> Events:
    """The measured time begins at 2 s, when the second job has made its first step.

    team-0 waits from 1 to 9 s, from 9.5 to 40 s and from 42 to 100 s; team-1 waits from 2 to 100 s.
    """
    first = [(turn(10.0, 1.0, queue_s=8.0),), (turn(41.0, 1.0, queue_s=30.5),), (turn(101.0, 1.0, queue_s=58.0),)]
    write_job(tmp_path, "team-0/job-00", [1.0, 50.0], first)
    late = turn(130.0, 1.0, tokens=70, queue_s=27.0).model_copy(update={"num_cached_tokens": 2})
    second = [(turn(102.0, 2.0, queue_s=98.0, tokens=17),), (late,)]
    write_job(tmp_path, "team-1/job-01", [2.0, 120.0], second)
    return load(tmp_path)


def test_service_and_idle_times_are_since_every_job_has_made_a_step(events: Events) -> None:
    log = log_of(events, 110.0)
    assert log.served == [(8.0, "team-0", 5), (39.0, "team-0", 5), (99.0, "team-0", 5), (100.0, "team-1", 20)]
    # A gap of half a second, from 9 to 9.5 s, is none. team-1's request for the turn that ended after the time waited from 102 s on.
    assert log.idle == {"team-0": [(38.0, 40.0), (98.0, 110.0)], "team-1": [(98.0, 100.0)]}


def test_only_tenants_that_waited_throughout_a_window_are_compared(events: Events) -> None:
    log = log_of(events, 98.0)
    assert windows(log, WEIGHTS, 98.0) == [], "team-0 was idle in the first window, and the second one is not complete"
    (window,) = windows(replace(log, idle={}), WEIGHTS, 98.0)
    assert window.services == {"team-0": 10.0, "team-1": 0.0}


def log(first: int, second: int, seconds: int = 60) -> Log:
    served = [
        (float(at), tenant, cost)
        for at in range(seconds)
        for tenant, cost in zip(WEIGHTS, (first, second), strict=True)
    ]
    return Log(served)


def test_targets_are_ratios_to_first_come_first_served() -> None:
    fair, first_come = log(10, 40), log(25, 25)
    found = targets([dict(zip(multitenant_shares.MODES, (fair, first_come), strict=True))], WEIGHTS, 60.0)
    assert found.splitlines() == [
        "largest difference against first come, first served: 0% (≤ 50 %)",
        "throughput against first come, first served: 100.0% (≥ 97 %)",
        "Jain's index over active tenants, mean: 1.000 (≥ 0.95, aim 0.99)",
    ]
    # Service / weight 20 and 30 · 60: a difference of 600 against 1,125.
    half = dict(zip(multitenant_shares.MODES, (log(20, 40), first_come), strict=True))
    assert (
        targets([half], WEIGHTS, 60.0)
        .splitlines()[0]
        .startswith("largest difference against first come, first served: 53%")
    )


async def order(limiter: RequestLimiter) -> list[str]:
    """The tenants of six requests in the order in which they enter an engine with one place; all asked while it was full."""
    entered: list[str] = []

    async def ask(tenant: str, number: int) -> None:
        account = Account(tenant, WEIGHTS[tenant], f"job-{tenant}")
        async with limiter.place(account, 5, 5) as place:
            entered.append(tenant)
            place.cost = 10.0
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for tenant in WEIGHTS:
            for number in range(3):
                group.create_task(ask(tenant, number))
    return entered


async def test_first_come_first_served_takes_requests_in_the_order_of_their_arrival(monkeypatch) -> None:
    arrived = ["team-0"] * 3 + ["team-1"] * 3
    assert await order(RequestLimiter(1)) != arrived
    for name in ("place", "alone"):
        monkeypatch.setattr(RequestLimiter, name, getattr(RequestLimiter, name))  # restored after the test
    changed_run.first_come()
    assert await order(RequestLimiter(1)) == arrived
