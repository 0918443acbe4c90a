"""`bench orchestrator_scale`: ratios of rounds, by hand."""

from bench.orchestrator_scale import Cost, report


def test_the_ratio_is_the_median_of_the_rounds():
    costs = {
        32: [Cost(5.0, 10.0, 24.0, 40.0), Cost(10.0, 10.0, 24.0, 40.0), Cost(8.0, 10.0, 24.0, 41.0)],
        512: [Cost(6.0, 12.0, 24.0, 80.0), Cost(11.0, 15.0, 23.0, 80.0), Cost(12.0, 11.0, 24.0, 90.0)],
    }
    lines = report(costs).splitlines()
    assert "| 32 | 8.0 (5.0 to 10.0) | 10.0 (10.0 to 10.0) |" in lines[2]
    assert lines[-2] == ("orchestrator, 512 jobs against 32: 1.20x (must 1.5x, aim 1.1x); rounds: 1.20, 1.10, 1.50")
    assert lines[-1] == "nats, 512 jobs against 32: 1.20x; rounds: 1.20, 1.50, 1.10"
