"""`python -m bench` as a newcomer meets it: what there is, what is no measurement, and one of them taken for real."""

import subprocess
import sys
from pathlib import Path

import pytest
from bench.__main__ import NAMES
from bench.gpu.__main__ import main

ROOT = Path(__file__).parents[2]


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "bench", *words], cwd=ROOT, capture_output=True, text=True)


def test_help_lists_every_measurement_with_what_it_measures() -> None:
    told = bench("--help")
    assert told.returncode == 0
    for name in NAMES:
        (line,) = (line for line in told.stdout.splitlines() if line.startswith(f"  {name} "))
        assert len(line.removeprefix(f"  {name}").strip()) > 20


@pytest.mark.parametrize("name", ["bus", "busy"])
def test_one_measurement_says_what_it_takes(name: str) -> None:
    told = bench(name, "--help")
    assert told.returncode == 0
    assert ("--number" if name == "bus" else "(no options)") in told.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["buss"], "measurement 'buss' does not exist; choose from bus, "),
        (["busy", "--seed", "1"], "busy: unexpected option --seed; options need a single measurement that has options"),
        (["bus", "trl", "--seed", "1"], "bus trl: unexpected option --seed; options need a single measurement"),
        (["bus", "--seed", "1"], "unrecognized arguments: --seed 1"),
    ],
)
def test_what_is_none_is_told_in_a_sentence(words: list[str], sentence: str) -> None:
    told = bench(*words)
    assert told.returncode == 2
    assert sentence in told.stderr
    assert "Traceback" not in told.stderr


def test_a_measurement_prints_the_ratio_of_two_sides() -> None:
    told = bench("bus", "--number", "200")
    assert told.returncode == 0, told.stderr
    header, *rows = [line for line in told.stdout.splitlines() if "KiB" in line or "ratio" in line]
    assert header.split() == ["gateway/s", "nats-py/s", "ratio"]
    assert len(rows) == 8
    for row in rows:
        gateway, raw, ratio = map(float, row.split()[-3:])
        assert gateway > 0
        assert ratio == pytest.approx(gateway / raw, abs=0.05)


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ("trainer --batches 2x16 --agents 2,3", 3 + 2 + 1),
        ("ceiling --tokens 16,32", 2),
        ("noise --rows 2 --prompt 4 --reply 6", 3),
    ],
)
def test_a_measurement_for_a_gpu_runs_on_a_cpu_with_a_small_shape(
    tmp_path_factory, capsys, words: str, rows: int
) -> None:
    """So that none fails for a slip when a GPU is at hand for half an hour."""
    model = tmp_path_factory.getbasetemp() / "gpu-shape"
    main([*words.split(), "--device", "cpu", "--repeats", "1", "--model", str(model)])
    lines = capsys.readouterr().out.splitlines()
    rules = [at for at, line in enumerate(lines) if line.startswith("|---")]
    assert len(lines) == rows + 2 * len(rules)
    for at, following in zip(rules, [*rules[1:], len(lines) + 1], strict=True):
        assert {line.count("|") for line in lines[at - 1 : following - 1]} == {lines[at].count("|")}
    assert not any("out of memory" in line or "nan" in line for line in lines)
