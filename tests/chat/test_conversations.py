import io

import pytest
from rich.console import Console

from marlaas.chat.conversations import Chat, ChatSampling, Columns, Side
from marlaas.chat.speakers import ScriptedSpeaker


@pytest.fixture
def chat() -> Chat:
    """The base counts what it has heard, the adapter echoes it."""
    answers = {Side.BASE: lambda said: f"{len(said)} so far", Side.ADAPTER: lambda said: said[-1][1]}
    return Chat(ScriptedSpeaker(answers), ChatSampling(max_tokens=5, temperature=1.0))


def test_each_side_gets_the_question_and_goes_on_with_its_own_replies(chat):
    pieces = []
    replies = dict(chat.ask("hello there", lambda side, piece: pieces.append((side, piece))))
    assert replies == {Side.BASE: "1 so far", Side.ADAPTER: "hello there"}
    assert pieces == [("base", "1"), ("base", " so"), ("base", " far"), ("adapter", "hello"), ("adapter", " there")]
    assert dict(chat.ask("again", lambda side, piece: None))[Side.BASE] == "3 so far"
    assert chat.transcripts[Side.ADAPTER][1] == ("assistant", "hello there")
    assert chat.transcripts[Side.BASE][1] == ("assistant", "1 so far")
    chat.begin()
    assert dict(chat.ask("new", lambda side, piece: None))[Side.BASE] == "1 so far"


@pytest.mark.parametrize("terminal", [True, False])
def test_replies_stand_side_by_side_and_cannot_drive_the_terminal(terminal):
    console = Console(file=io.StringIO(), width=60, force_terminal=terminal, color_system=None)
    with Columns(console, {Side.BASE: "tiny", Side.ADAPTER: "trained"}) as columns:
        columns.append(Side.BASE, "one\x1b[2J")
        columns.append(Side.ADAPTER, "[bold]two[/bold]")
    lines = console.file.getvalue().splitlines()
    assert any("tiny" in line and "trained" in line for line in lines)
    assert any("one\\x1b[2J" in line and "[bold]two[/bold]" in line for line in lines)
