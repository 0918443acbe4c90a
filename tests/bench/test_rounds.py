"""Figures of several rounds, by hand."""

from bench.rounds import bootstrap, ratios, spread


def test_several_values_are_told_with_the_least_and_the_largest():
    assert spread([1.234]) == "1.23"
    assert spread([3.0, 1.0, 2.5]) == "2.50 (1.00 to 3.00)"
    assert spread([0.25, 0.75], ".0%") == "50% (25% to 75%)"


def test_ratios_are_paired_by_round():
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]


def test_the_interval_holds_the_ratio_and_is_a_point_without_noise():
    assert bootstrap([[3.0, 3.0]], [[2.0, 2.0]]) == (1.5, 1.5)
    low, high = bootstrap([[2.0, 2.1, 1.9, 2.2], [2.0, 2.3, 1.8, 2.0]], [[1.0, 1.1, 0.9, 1.0], [1.0, 1.2, 0.8, 1.0]])
    assert 1.5 < low < 2.0 < high < 2.5
