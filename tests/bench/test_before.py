"""`bench before`: the numbers of two outputs are paired by name, whatever their form."""

import json

import pytest
from bench.before import CASES, MULTITENANT, main
from bench.printed_numbers import compared, numbers, unmatched

TEXT = """
| jobs | orchestrator ms/step | steps/s |
| --- | --- | --- |
| 32 | 7.8 (7.1 to 9.0) | 23.9 |
| 512 | 9.9 |  |

| adapters | role tok/s |
|---|---|
| 1 | 1,234 |

orchestrator, 512 jobs against 32: 1.27x (must 1.5x, aim 1.1x)
                               gateway/s   nats-py/s   ratio
  1 KiB publish                   5000        2500    2.00
 64 KiB publish                   500         250     2.00
calculator: fork to first turn p50 11.5 ms, p95 20.0 ms
calculator: fork to first turn p50 1.5 ms, p95 2.0 ms
"""


def test_numbers_are_named_by_their_place() -> None:
    found = numbers(TEXT)
    assert found["jobs 32: orchestrator ms/step"] == 7.8
    assert found["jobs 32: steps/s"] == 23.9
    assert found["jobs 512: orchestrator ms/step"] == 9.9
    assert "jobs 512: steps/s" not in found
    assert found["adapters 1: role tok/s"] == 1234.0
    assert found["calculator: fork to first turn p50 … ms, p95 … ms [1]"] == 20.0
    assert found["calculator: fork to first turn p50 … ms, p95 … ms [1] (2)"] == 2.0
    assert found["1 KiB publish: gateway/s"] == 5000.0
    assert found["64 KiB publish: nats-py/s"] == 250.0
    assert found["orchestrator, … jobs against …: …x (must …x, aim …x) [2]"] == 1.27


def test_numbers_of_an_object_are_named_by_their_path() -> None:
    line = json.dumps({"shape": "tiny", "ok": True, "tokens_per_s": {"ours": 100, "plain": 50.5}, "list": [1]})
    assert numbers(line) == {"tiny.tokens_per_s.ours": 100.0, "tiny.tokens_per_s.plain": 50.5}


def test_ratios_are_paired_by_round_and_settings_are_left_out() -> None:
    pairs = [({"a": 2.0, "jobs": 8.0, "none": 0.0}, {"a": 2.1, "jobs": 8.0, "none": 1.0})]
    pairs += [({"a": 4.0, "jobs": 8.0, "none": 0.0}, {"a": 5.0, "jobs": 8.0, "none": 1.0})]
    pairs += [({"a": 3.0, "jobs": 8.0, "none": 0.0}, {"a": 3.0, "jobs": 8.0, "none": 1.0})]
    assert compared(pairs) == [["a", "3", "3", "1.05 (1.00 to 1.25)", "yes"]]
    assert compared(pairs[1:2]) == [["a", "4", "5", "1.25", "**no**"]]


def test_numbers_that_only_one_side_has_are_named() -> None:
    assert unmatched([({"a": 1.0, "old": 2.0}, {"a": 1.0, "new": 3.0})]) == ["new", "old"]
    assert unmatched([({"a": 1.0}, {"a": 2.0})] * 2) == []


def test_the_cases_are_chosen_by_name(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--cases", "nothing"])
    told = capsys.readouterr().err
    assert all(name in told for name in (*CASES, MULTITENANT))
