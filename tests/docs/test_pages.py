"""The pages are short-lined, linked and complete, and the names in them exist."""

import json
import re
import subprocess

import pytest
import yaml
from tests.docs.markdown import LANGUAGES, ROOT, blocks, cells, name, pages, without_blocks
from tests.tables import data
from tools.crd import PRESENTATIONS

from marlaas_api.reasons import Reason
from tools import measurements_page, promises_page

MAX_LINE, MAX_CELL = 600, 160
EVERY = [*pages(), ROOT / "CHANGELOG.md", ROOT / "tests/FLAKY.md"]
GENERATED = {ROOT / "docs/reference" / f"{page}.md" for page in ("api", "reasons", "measurements", "promises")}
TEXT = {page: page.read_text("utf-8") for page in EVERY}
VALUES = yaml.safe_load((ROOT / "charts/marlaas/values.yaml").read_text("utf-8"))


@pytest.mark.parametrize("page", EVERY, ids=name)
def test_no_line_and_no_cell_is_long(page):
    lines = TEXT[page].splitlines()
    assert [line for line in lines if len(line) > MAX_LINE] == []
    rows = [line for line in without_blocks(TEXT[page]).splitlines() if line.startswith("|")]
    assert [cell for row in rows for cell in cells(row) if len(cell) > MAX_CELL] == []


def test_every_page_is_looked_at():
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {ROOT / path for path in listed.splitlines()} == set(EVERY)


@pytest.mark.parametrize("page", pages(), ids=name)
def test_every_block_has_a_language_that_says_how_it_is_tested(page):
    own = [block for block in blocks() if block.page == page]
    assert {block.language for block in own} <= set(LANGUAGES)
    assert len(own) * 2 == len(re.findall(r"^```", TEXT[page], re.MULTILINE))


@pytest.mark.parametrize("page", EVERY, ids=name)
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(TEXT[page])):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def _anchors(page):
    """The anchors of a page, as GitHub makes them from headings, and those that are written out."""
    text = without_blocks(page.read_text("utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w -]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line).lower()) for line in headings}
    return {line.strip().replace(" ", "-") for line in made} | set(re.findall(r'<a id="([^"]+)">', text))


def test_every_page_is_in_the_menu_the_index_and_the_readme():
    menu = set(re.findall(r"\S+\.md$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE))
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert menu == there
    assert set(re.findall(r"\]\(([^)]+\.md)\)", TEXT[ROOT / "docs/index.md"])) == there - {"index.md"}
    linked = {link.partition("#")[0] for link in re.findall(r"\]\((docs/[^)]+\.md[^)]*)\)", TEXT[ROOT / "README.md"])}
    assert linked == {name(page) for page in pages() if page.is_relative_to(ROOT / "docs")}
    assert TEXT[ROOT / "README.md"].count("\n") <= 170


def test_every_page_that_the_tree_names_is_there():
    """Error messages, comments, manifests and tests name pages as docs/….md."""
    folders = ("operator", "workers", "charts", "crds", "examples", "tests", "e2e", "bench", "tools", "images")
    files = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml", ".txt")
    ]
    for path in (*files, ROOT / "Makefile"):
        for page in re.findall(r"(?<![\w./])docs/[\w/-]+\.(?:md|png)", path.read_text("utf-8")):
            assert (ROOT / page).exists(), f"{path} names {page}"


@pytest.mark.parametrize("page", pages(), ids=name)
def test_every_file_that_is_named_is_there(page):
    text = TEXT[page]
    named = set(re.findall(r"(?<![\w/.-])(?:examples|images|charts|docs|tests|tools|crds)/[\w./-]*\w", text))
    names = sorted(path for path in named if not re.search(r"/[A-Z]+\.", path))  # a word in capitals stands for a name
    assert [path for path in names if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", sorted(set(pages()) - GENERATED), ids=name)
def test_a_figure_that_points_to_its_measurement_is_that_one(page):
    figures = {claim.id: claim.figure for section in measurements_page.sections() for claim in section.claims}
    for label, anchor in re.findall(r"\[([^\]]+)\]\([^)]*measurements\.md#([\w-]+)\)", TEXT[page]):
        numbers = re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", label)
        assert not numbers or set(numbers) <= set(re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", figures[anchor])), label


def test_every_file_and_test_of_a_promise_is_there():
    assert list(promises_page.missing()) == []


def test_every_value_of_the_chart_is_one_and_every_column_is_explained():
    text = "\n".join(TEXT[page] for page in pages())
    keys = re.findall(r"`((?:nats|blobs|network|operator|crds)\.[a-z]\w+(?:\.\w+)*)`", text)
    assert len(keys) > 5
    for key in set(keys) - {"nats.conf"}:
        value = VALUES
        for step in key.split("."):
            assert step in value, key
            value = value[step]
    text = TEXT[ROOT / "docs/reference/status.md"]
    for kind in ("RLJob", "ModelPool"):
        for heading, *_ in PRESENTATIONS[kind].columns:
            assert heading == "Age" or heading.upper() in text, heading


def test_every_reason_and_every_metric_that_is_named_is_one():
    text = TEXT[ROOT / "docs/how-to/kubernetes.md"]
    section = text.partition("## When it waits or fails")[2]
    rows = re.findall(r"^\| (?:\*Failed:\* )?((?:[A-Z][a-z]+[A-Za-z]*(?:, )?)+) \|", section, re.MULTILINE)
    named = {word for row in rows for word in row.split(", ")} | set(re.findall(r"\(`([A-Z]\w+)`", section))
    assert Reason.WAITING_FOR_POOL in named
    assert named <= set(Reason)
    folders = (ROOT / "workers/marlaas_worker", ROOT / "operator")
    source = "\n".join(path.read_text("utf-8") for folder in folders for path in folder.rglob("*.py"))
    named = {word for text in TEXT.values() for word in re.findall(r"`(marlaas_[a-z_]+)(?:\{[\w,]*\})?`", text)}
    named -= {folder.name for source in ("operator", "workers", "e2e") for folder in (ROOT / source).iterdir()}
    assert len(named) > 50
    for metric in named:  # most names are put together: a prefix in braces, then the rest
        rests = [metric[at:] for at in range(len(metric)) if metric[at] == "_"]
        assert f'"{metric}' in source or any(f"}}{rest}" in source or f'"{rest[1:]}"' in source for rest in rests), (
            metric
        )


def test_every_function_of_one_step_is_where_the_page_says():
    functions = re.findall(r"\[`([\w.]+)`\]\((?:\.\./)+([\w/.]+)\)", TEXT[ROOT / "docs/explanation/one-step.md"])
    assert len(functions) > 30
    for function, path in functions:
        source = (ROOT / path).read_text("utf-8")
        for part in function.split("."):
            assert re.search(rf"(?:def|class) {part}\b", source), f"{function} in {path}"


def test_results_are_formatted_so_that_a_new_figure_is_a_small_difference():
    for path in measurements_page.RESULTS.glob("*.json"):
        text = path.read_text("utf-8")
        assert text == json.dumps(json.loads(text), indent=2, ensure_ascii=False) + "\n", path


SOURCE = data(__file__, "promises_source")
HERE = "test_a_missing_file_and_a_missing_test_are_reported_and_a_moved_one_with_its_place"


def test_a_missing_file_and_a_missing_test_are_reported_and_a_moved_one_with_its_place(tmp_path, monkeypatch, capsys):
    source = tmp_path / "promises.toml"
    source.write_text(SOURCE.format(here=HERE))
    monkeypatch.setattr(promises_page, "SOURCE", source)
    assert list(promises_page.missing()) == [
        "one: no file tools/nowhere.py",
        "one: no test tests/docs/test_pages.py::test_that_is_nowhere",
        f"one: no test tests/docs/test_examples.py::{HERE}; it is in tests/docs/test_pages.py",
        "one: no test tests/docs/test_nowhere.py",
    ]
    page = tmp_path / "promises.md"
    assert promises_page.main([str(page)]) == 1
    assert "tools/promises.toml: one: no file" in capsys.readouterr().err
