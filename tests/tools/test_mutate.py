"""tools/mutate.py: a mutation that no longer fits the sources is refused; those of the tree fit."""

from pathlib import Path

import pytest
from tools.mutate import ROOT, BadMutation, Mutation

from tools import mutate

AREAS = sorted(path.stem for path in mutate.FOLDER.glob("*.toml"))


def mutation(old: str, new: str = "x") -> Mutation:
    return Mutation("area", "name", "a.py", old, new, ("tests/rl",))


@pytest.mark.parametrize("area", AREAS)
def test_every_mutation_of_the_tree_applies_once_and_its_tests_exist(area):
    mutations = mutate.read(area)
    assert len({one.name for one in mutations}) == len(mutations) > 0
    for one in mutations:
        source = (ROOT / one.file).read_text(encoding="utf-8")
        assert one.apply(source) != source
        words = [word for word in one.tests if word.startswith("tests/")]
        assert words, one.name
        assert [word for word in words if not (ROOT / word.partition("::")[0]).exists()] == [], one.name


@pytest.mark.parametrize(("old", "new"), [("c", "x"), ("a", "x"), ("b", "b")], ids=["missing", "twice", "no change"])
def test_a_mutation_that_does_not_fit_is_refused(old, new):
    with pytest.raises(BadMutation, match=r"area: name: its text occurs \d times in a.py, not once"):
        mutation(old, new).apply("a = a + b")


def interrupt_while_applied(path: Path) -> None:
    changed_at = path.stat().st_mtime
    with mutate.applied(mutation("b", "c")):
        assert path.read_text() == "a = c\n"
        assert int(path.stat().st_mtime) > int(changed_at), "Python compares the time in seconds with its bytecode's"
        raise KeyboardInterrupt


def test_a_file_is_changed_for_a_while_and_restored_after_ctrl_c(tmp_path, monkeypatch):
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    path = tmp_path / "a.py"
    path.write_text("a = b\n")
    with pytest.raises(KeyboardInterrupt):
        interrupt_while_applied(path)
    assert path.read_text() == "a = b\n"
