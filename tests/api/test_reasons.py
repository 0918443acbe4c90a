"""The table of reasons is whole, and nobody says a reason that is not in it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.reasons_page import main, page

from marlaas_api.kinds.status import Condition
from marlaas_api.reason_texts import TEXTS, Actor, ReasonStage, text_of
from marlaas_api.reasons import Reason

ROOT = Path(__file__).parents[2]
ORCHESTRATOR = ROOT / "workers" / "marlaas_worker" / "orchestrator"
OPERATOR = ROOT / "operator" / "marlaas_operator"
CAMEL = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]+)*")
STORY = {"PolicyPublished", "Evaluated"}
"""What the orchestrator tells as a story alone: it stands in no status."""


@pytest.mark.parametrize("reason", Reason)
def test_a_condition_takes_every_reason_which_tells_in_sentences_what_it_means_and_what_to_do(reason: Reason) -> None:
    Condition(type="Admitted", status="False", reason=reason, last_transition_time="2026-01-01T00:00:00Z")
    assert CAMEL.fullmatch(reason)
    text = TEXTS[reason]
    for sentences in (text.meaning, text.advice):
        assert sentences.endswith(".")
        assert sentences[0].isupper()
    if text.stage in (ReasonStage.FAULTY, ReasonStage.FAILED):
        assert text.actor is not Actor.NOBODY
        assert text.advice != "Do nothing."


def test_a_word_that_is_none_of_ours_has_no_text() -> None:
    assert text_of("BrandNew") is None
    assert text_of("Training") is TEXTS[Reason.TRAINING]


def test_somebody_says_every_reason_and_nobody_another_one() -> None:
    by_orchestrator = _said_in(ORCHESTRATOR)
    assert by_orchestrator - STORY <= set(Reason)
    assert set(Reason) - by_orchestrator - _said_in(OPERATOR) == set()
    said = {word for path in OPERATOR.rglob("*.py") for word in _given_as_reason(ast.parse(path.read_text()))}
    assert said <= set(Reason)


def test_a_stale_page_is_found_and_written_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stale = tmp_path / "reasons.md"
    assert main([str(stale), "--check"]) == 1
    assert "is stale" in capsys.readouterr().err
    assert main([str(stale)]) == 0
    assert stale.read_text() == page()
    assert all(f"### {reason}\n" in page() for reason in Reason)


def _said_in(folder: Path) -> set[str]:
    return {word for path in folder.rglob("*.py") for word in _words(ast.parse(path.read_text()))}


def _words(tree: ast.AST) -> Iterator[str]:
    """Members of Reason, and constants that are one CamelCase word; annotations in quotes name classes and are none."""
    annotations = (note for node in ast.walk(tree) for note in _annotations(node) if note is not None)
    quoted = {id(one) for note in annotations for one in ast.walk(note)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if CAMEL.fullmatch(text) and id(node) not in quoted:
                yield text
            case ast.Attribute(value=ast.Name(id="Reason"), attr=name) if name in Reason.__members__:
                yield Reason[name].value


def _annotations(node: ast.AST) -> tuple[ast.AST | None, ...]:
    match node:
        case ast.arg() | ast.AnnAssign():
            return (node.annotation,)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return (node.returns,)
    return ()


def _given_as_reason(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "reason" and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            yield from (
                str(value.value)
                for key, value in pairs
                if isinstance(key, ast.Constant) and key.value == "reason" and isinstance(value, ast.Constant)
            )
