"""Generator of docs/reference/reasons.md from the table of reasons; with --check, compare the file with the table."""

import sys

from marlaas_api.reason_texts import TEXTS, ReasonStage
from marlaas_api.reasons import Reason
from tools.api_docs import write_or_check

_HEADINGS = {
    ReasonStage.WAITING: (
        "Waiting",
        "Nothing is wrong with the object; something else has to happen first.",
    ),
    ReasonStage.FAULTY: (
        "Faults that end with their cause",
        "The job keeps its place, its slots and its committed steps.",
    ),
    ReasonStage.FAILED: (
        "Failed",
        "A failed job stays as it is, to be read; a corrected one is a new object.",
    ),
    ReasonStage.WORKING: ("Normal operation", "Nothing has to be done."),
    ReasonStage.ENDED: ("Succeeded", "Nothing more happens."),
}
_PREFACE = """# Reasons: what a status says, and what to do

Generated from `operator/marlaas_api/reason_texts.py` by `make crds`; do not edit.

The REASON column of `kubectl get rljobs`, the conditions of `kubectl describe` and the events use these words and no others.
`kubectl marlaas why NAME` explains the current reason, with its message.
In parentheses: who has to act.
"""


def page() -> str:
    """Return the whole page."""
    return _PREFACE + "".join(
        f"\n## {title}\n\n{words}\n{entries(stage)}" for stage, (title, words) in _HEADINGS.items()
    )


def entries(stage: ReasonStage) -> str:
    """Return the reasons of one stage, each with a heading of its own."""
    return "".join(_entry(reason) for reason, text in TEXTS.items() if text.stage is stage)


def _entry(reason: Reason) -> str:
    text = TEXTS[reason]
    return f"\n### {reason}\n\n{text.meaning}\n\n*What to do ({text.actor}):* {text.advice}\n"


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or with --check compare it; return 0 on success, 1 if the file is stale."""
    return write_or_check("tools.reasons_page", page, arguments)


if __name__ == "__main__":
    sys.exit(main())
