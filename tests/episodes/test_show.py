import io

from rich.console import Console

from marlaas.episodes.record import joined
from marlaas.episodes.selection import Played
from marlaas.episodes.show import rich
from marlaas_api.last_words import visible
from marlaas_api.messages import ChatMessage, Ending, FaultClass


def _text(one, **options: bool):
    console = Console(file=io.StringIO(), width=200)
    console.print(rich(one, **options))
    return console.file.getvalue()


def test_an_episode_of_two_agents_shows_who_spoke_and_whose_reward_and_advantage(episode, turn):
    one = episode(5, 1, rewards={"caller": 1.0, "reader": 0.25}, metrics={"agreed": 1})
    heard = (ChatMessage(role="tool", content="46", name="calc"),)
    # Each agent numbers its own turns.
    turns = [
        turn(one, 0, "46", agent="reader", version=2, append=heard, at=101.0),
        turn(one, 0, "calc: 12+34", agent="caller", version=4, at=100.0),
    ]
    rewards = {"caller": (0.0, 1.0), "reader": (0.75, 0.25)}
    played = Played("a/relay", joined(one, turns), 3, rewards, {"caller": 1.0, "reader": -1.0})
    assert [line.rstrip() for line in _text(played).splitlines()] == [
        "a/relay · step 3 · task 5 · member 1 · versions caller 4, reader 2 · 0.5 s",
        "  user: spell 0",
        "  caller: calc: 12+34  [stop, 3 tokens]",
        "  tool (calc): 46",
        "  reader: 46  [stop, 3 tokens]",
        "  reward of caller 1  advantage +1.00  group 0 1",
        "  reward of reader 0.25  advantage -1.00  group 0.75 0.25",
        "  agreed 1",
        "",
    ]
    assert "ids 7 8 9" in _text(played, tokens=True), "token ids are shown on request"
    assert "version caller 4 · " in _text(Played("a/relay", joined(one, turns[1:]))), "only one of them spoke"


def test_what_did_not_go_well_is_said(episode, turn):
    broke = joined(episode(0, 0, 0.0, ending=Ending.TOOL_ERROR, prior_faults=(FaultClass.INFRA,)), [])
    text = _text(Played("a/b", broke))
    assert "tool error of the policy" in text
    assert "played again after infra" in text
    assert "no turn" in text
    assert "step not finished" in text
    fault = joined(episode(0, 1, fault=FaultClass.ENV, fault_text="KeyError: 'x'", rewards={}), [])
    text = _text(Played("a/b", fault))
    assert "fault: env (not scored)" in text
    assert "KeyError: 'x'" in text
    assert "reward" not in text


def test_what_a_model_wrote_cannot_drive_the_terminal(episode, turn):
    one = episode(fault=None)
    played = Played("a/b", joined(one, [turn(one, text="\x1b]0;owned\x07 \x1b[2J[bold]not markup[/bold]")]))
    text = _text(played)
    assert "\x1b" not in text
    assert "\\x1b]0;owned\\x07" in text
    assert "[bold]not markup[/bold]" in text
    assert visible("a\tb\nc\r\x9b") == "a\tb\nc\\x0d\\x9b"
