"""docs/reference/algorithms.md says what the code does: its table is the code's."""

from pathlib import Path

from marlaas_worker.rl.algorithms import ALGORITHMS
from marlaas_worker.rl.corrections import CAPS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "algorithms.md"


def rows(header):
    """Cells of the page's table with this first header."""
    _, _, after = PAGE.read_text(encoding="utf-8").partition(f"| {header} |")
    lines = after.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def test_the_pages_table_is_the_registry():
    found = {cells[0]: cells[1:7] for cells in rows("algorithm")}
    for name, rule in ALGORITHMS.items():
        clip = "none" if rule.surrogate == "weighted" else ", ".join(f"{bound:g}" for bound in rule.clip)
        assert found.pop(name) == [rule.advantage, rule.over, rule.ratio, rule.surrogate, rule.normaliser, clip]
    assert not found


def test_the_pages_corrections_have_the_codes_caps():
    assert {cells[0]: cells[2] for cells in rows("`correction.type`")} == {
        **{name: f"{cap:g}" for name, cap in CAPS.items()},
        "none": "",
    }


def test_every_algorithm_has_a_case_for_it_and_a_formula_for_each_of_its_words():
    assert {cells[1] for cells in rows("you have")} == set(ALGORITHMS)
    words = {cells[0] for cells in rows("word")}
    for rule in ALGORITHMS.values():
        assert {rule.advantage, rule.surrogate, f"ratio of a {rule.ratio}", f"mean over {rule.normaliser}"} <= words
