"""What docs/reference/environments.md and docs/how-to/openai.md claim; tests/docs runs their examples."""

import re
from pathlib import Path

import pytest
from tests.environment.playing import play

from marlaas.envs import BUILTINS
from marlaas.envs.puzzles import dataset_names

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "reference" / "environments.md"


def python(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def test_what_the_page_counts_is_so() -> None:
    (text,) = [text for text in python(PAGE) if text.startswith("# sums.py")]
    code = [line for line in text.splitlines()[3:] if line.strip()]
    assert len(code) <= 10, "the rubric takes ten lines"
    page = PAGE.read_text()
    assert f"({len(dataset_names())}), in one turn" in page
    assert all(f"### {name}" in page for name in BUILTINS if name not in ("calculator", "reverse"))


def test_the_agent_of_the_openai_page_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = python(DOCS / "how-to" / "openai.md")
    (tmp_path / "adder.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    replies: list[str] = []

    def answer(request) -> str:
        if request.parent is None:
            replies.append(str(sum(map(int, re.findall(r"\d+", request.append[0].content)))))
            return "It is " + replies[0]
        return replies[0]

    outcome, channel = play("adder:play", {}, answer)
    assert outcome.rewards == {"policy": 1.0}
    assert [asked.request.parent for asked in channel.asked] == [None, 0]
