"""The measurements for a GPU run on a CPU with a small shape, so that none fails for a slip when a GPU is at hand for half an hour."""

from pathlib import Path

import pytest
from bench.gpu.__main__ import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu-shape")


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (["trainer", "--batches", "2x16", "--agents", "2,3"], 3 + 2 + 1),
        (["ceiling", "--tokens", "16,32"], 2),
        (["noise", "--rows", "2", "--prompt", "4", "--reply", "6"], 3),
    ],
    ids=["trainer", "ceiling", "noise"],
)
def test_it_measures_a_small_shape_on_a_cpu(
    model: Path, capsys: pytest.CaptureFixture[str], words: list[str], rows: int
) -> None:
    main([*words, "--device", "cpu", "--repeats", "1", "--model", str(model)])
    lines = capsys.readouterr().out.splitlines()
    rules = [at for at, line in enumerate(lines) if line.startswith("|---")]
    assert len(lines) == rows + 2 * len(rules)
    for at, following in zip(rules, [*rules[1:], len(lines) + 1], strict=True):
        assert {line.count("|") for line in lines[at - 1 : following - 1]} == {lines[at].count("|")}
    assert not any("out of memory" in line or "nan" in line for line in lines)
