"""`python -m bench` as a newcomer meets it, and the measurements for a GPU on a CPU."""

import json

import pytest
from bench.__main__ import NAMES, main
from bench.gpu.__main__ import main as gpu_main
from tests.tables import rows


def test_help_lists_every_measurement_with_what_it_measures(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    told = capsys.readouterr().out.splitlines()
    for name in NAMES:
        (line,) = (line for line in told if line.startswith(f"  {name} "))
        assert len(line.removeprefix(f"  {name}").strip()) > 20


@pytest.mark.parametrize(("words", "sentence"), rows(__file__, "wrong_words"))
def test_what_is_none_is_told_in_a_sentence(capsys, words, sentence):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_all_measurements_for_a_gpu_run_within_minutes_and_leave_their_tables(tmp_path):
    gpu_main(["all", "--minutes", "5", "--shape", "tiny", "--device", "cpu", "--out", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())["measurements"]
    assert [(one["exit"], [len(table["rows"]) for table in one["tables"]]) for one in found] == [
        (0, [5, 2, 1]), (0, [2]), (0, [2]), (0, [3])
    ]  # fmt: skip


@pytest.mark.parametrize(("words", "num_rows"), rows(__file__, "gpu_measurements"))
def test_a_measurement_for_a_gpu_runs_on_a_cpu_with_a_small_shape(tmp_path_factory, capsys, words, num_rows):
    """So that none fails for a slip when a GPU is at hand for half an hour."""
    model = tmp_path_factory.getbasetemp() / "gpu-shape"
    gpu_main([*words.split(), "--device", "cpu", "--repeats", "1", "--model", str(model)])
    lines = capsys.readouterr().out.splitlines()
    rules = [at for at, line in enumerate(lines) if line.startswith("|---")]
    assert len(lines) == num_rows + 2 * len(rules)
    assert not any("out of memory" in line or "nan" in line for line in lines)
