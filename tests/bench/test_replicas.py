"""Figures of `bench replicas` and the time of its simulated engine, by hand."""

import asyncio

from bench.replica_figures import Observed, rates
from bench.simulated_pool import Bandwidth
from bench.virtual_time import VirtualLoop

from marlaas_api.messages import ReplicaReport


def report(name: str, busy_s: float, wall_s: float, **fields: object) -> ReplicaReport:
    return ReplicaReport(role=name.partition("-")[0], pool="tiny", replica=name, busy_s=busy_s, wall_s=wall_s, **fields)


def observed(at: float, cpu_s: float, *reports: ReplicaReport) -> Observed:
    return Observed(at, cpu_s, {one.replica: one for one in reports})


def test_rates_are_the_differences_of_two_moments():
    before = observed(
        100.0,
        5.0,
        report("rollout-0", 10.0, 20.0, job_tokens={"a": 500, "b": 900}),
        report("rollout-1", 10.0, 20.0),
        report("trainer-0", 4.0, 20.0),
    )
    after = observed(
        110.0,
        9.0,
        report("rollout-0", 20.0, 30.0, job_tokens={"a": 510, "b": 900}),
        report("rollout-1", 15.0, 30.0, job_tokens={"a": 90, "c": 5}),
        report("trainer-0", 6.0, 30.0, bound=("x", "y")),
    )
    found = rates(before, after, [[99.0, 101.0, 105.0, 109.0], [100.0, 110.0], [104.0]])
    assert found.steps_per_s == 2 / 8 + 1 / 10, "a job with one commit has no rate"
    assert (found.tokens_per_s, found.engines_busy, found.trainers_busy, found.cpu_cores) == (10.5, 0.75, 0.2, 0.4)
    assert found.spread == "0 + 2 / 2", "b generated nothing in between"


def test_running_requests_share_the_tokens_of_an_engine():
    ends: dict[str, float] = {}

    async def request(bandwidth: Bandwidth, name: str, begin: float, num_tokens: int) -> None:
        await asyncio.sleep(begin)
        await bandwidth.take(num_tokens)
        ends[name] = round(asyncio.get_running_loop().time(), 3)

    async def run() -> None:
        bandwidth = Bandwidth(10.0)
        await asyncio.gather(request(bandwidth, "long", 0.0, 30), request(bandwidth, "short", 1.0, 5))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())
    assert ends == {"short": 2.0, "long": 3.5}
