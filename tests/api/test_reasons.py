"""The table of reasons is whole, and nobody says a reason that is not in it."""

import re
from pathlib import Path

import pytest
from tools.reasons_page import main, page

from marlaas_api.blobs import BlobFull, BlobRefused, BlobUnavailable
from marlaas_api.errors import Unreadable
from marlaas_api.kinds.status import Condition
from marlaas_api.reason_texts import TEXTS, Actor, ReasonStage
from marlaas_api.reasons import Reason

ROOT = Path(__file__).parents[2]
ORCHESTRATOR = ROOT / "workers" / "marlaas_worker" / "orchestrator"
OPERATOR = ROOT / "operator" / "marlaas_operator"
CAMEL = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]+)*")
STORY = {"PolicyPublished", "Evaluated"}
"""What the orchestrator tells as a story alone: it stands in no status."""


@pytest.mark.parametrize("reason", Reason)
def test_a_condition_takes_every_reason_which_tells_in_sentences_what_it_means_and_what_to_do(reason):
    Condition(type="Admitted", status="False", reason=reason, last_transition_time="2026-01-01T00:00:00Z")
    assert CAMEL.fullmatch(reason)
    text = TEXTS[reason]
    for sentences in (text.meaning, text.advice):
        assert sentences.endswith(".")
        assert sentences[0].isupper()
    if text.stage in (ReasonStage.FAULTY, ReasonStage.FAILED):
        assert text.actor is not Actor.NOBODY
        assert text.advice != "Do nothing."


def test_somebody_says_every_reason_and_nobody_another_one():
    waits = {error.reason for error in (BlobUnavailable, BlobFull, BlobRefused, Unreadable)}
    assert set(Reason) - _said_in(ORCHESTRATOR) - _said_in(OPERATOR) - waits == set()
    sources = (path.read_text() for folder in (ORCHESTRATOR, OPERATOR) for path in folder.rglob("*.py"))
    given = {word for text in sources for word in re.findall(rf'reason"?[=:] ?"({CAMEL.pattern})"', text)}
    assert given - STORY <= set(Reason)


def test_a_stale_page_is_found_and_written_anew(tmp_path, capsys):
    stale = tmp_path / "reasons.md"
    assert main([str(stale), "--check"]) == 1
    assert "is stale" in capsys.readouterr().err
    assert main([str(stale)]) == 0
    assert stale.read_text() == page()
    assert all(f"### {reason}\n" in page() for reason in Reason)


def _said_in(folder: Path) -> set[str]:
    """Members of Reason, and constants that are one CamelCase word."""
    text = "\n".join(path.read_text() for path in folder.rglob("*.py"))
    members = {Reason[name].value for name in re.findall(r"\bReason\.([A-Z_]+)\b", text)}
    return members | set(re.findall(rf'"({CAMEL.pattern})"', text))
