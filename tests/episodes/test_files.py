import gzip
import io
import json

import pytest
from rich.console import Console

from marlaas.episodes import files
from marlaas.episodes.files import OPEN, EpisodeFollower, EpisodeWriter, parts, read
from marlaas.episodes.prompts import PromptTexts
from marlaas.episodes.record import joined
from marlaas.episodes.selection import Played
from marlaas.episodes.show import as_json, rich
from marlaas.models.tokenizer import VOCABULARY, save_tokenizer
from marlaas_api.errors import InvalidInput
from marlaas_api.last_words import visible
from marlaas_api.messages import ChatMessage, Ending, FaultClass, ReplyPartsMessage, ToolCallMessage
from marlaas_api.wire import pack_ids


def test_an_episode_is_read_back_as_it_was_generated(tmp_path, episode, turn):
    one = episode(4, 1, 0.5, metrics={"correct": 0.5})
    record = joined(one, [turn(one, 1, "second"), turn(one, 0, "first")])
    EpisodeWriter(tmp_path).append([record])
    (back,) = read(tmp_path)
    assert back == record
    assert [(turn.text, turn.version) for turn in back.turns] == [("first", 3), ("second", 3)]
    assert back.turns[0].output_ids == (7, 8, 9)
    assert back.turns[0].logprobs == (-0.1235, -1.0, 0.0)
    assert back.turns[1].append == (ChatMessage(role="user", content="spell 1"),)
    assert back.at == 101.0


def test_an_episode_that_comes_twice_is_kept_once_also_over_a_restart(tmp_path, episode):
    record = joined(episode(0, 0), [])
    first = EpisodeWriter(tmp_path)
    first.append([record, record])
    first.append([record])
    EpisodeWriter(tmp_path).append([record, joined(episode(0, 1), [])])
    assert [one.member for one in read(tmp_path)] == [0, 1]
    assert len((tmp_path / OPEN).read_bytes().splitlines()) == 2
    EpisodeWriter(tmp_path).append([joined(episode(0, 1, 0.0, attempt=2), [])])
    assert [one.reward for one in read(tmp_path)] == [1.0, 1.0], "of several plays of a member the first counts"


def test_a_line_that_a_kill_cut_off_is_removed_and_written_anew(tmp_path, episode):
    EpisodeWriter(tmp_path).append([joined(episode(0, member), []) for member in range(2)])
    path = tmp_path / OPEN
    path.write_bytes(path.read_bytes()[:-20])
    assert [one.member for one in read(tmp_path)] == [0]
    EpisodeWriter(tmp_path).append([joined(episode(0, 1), [])])
    assert [one.member for one in read(tmp_path)] == [0, 1]


def test_a_line_that_is_no_episode_is_told_by_file_and_line(tmp_path, episode):
    EpisodeWriter(tmp_path).append([joined(episode(0, 0), [])])
    with (tmp_path / OPEN).open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(InvalidInput, match=r"episodes.jsonl:2 is not an episode"):
        list(read(tmp_path))


def test_what_is_kept_is_bounded_and_the_oldest_goes(tmp_path, episode, turn):
    bound = 20_000
    kept = EpisodeWriter(tmp_path, bound)
    for index in range(400):
        one = episode(index)
        kept.append([joined(one, [turn(one, 0, f"{index}" * 40)])])
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= bound + 1000
    indices = [one.index for one in read(tmp_path)]
    assert indices == sorted(indices)
    assert indices[-1] == 399
    assert 0 not in indices
    assert len(parts(tmp_path)) >= 2
    with gzip.open(parts(tmp_path)[0]) as lines:
        assert next(iter(lines)).startswith(b'{"episode"')


def test_a_kill_between_compressing_and_removing_shows_nothing_twice(tmp_path, episode):
    EpisodeWriter(tmp_path).append([joined(episode(0, 0), [])])
    with gzip.open(tmp_path / "episodes-0001.jsonl.gz", "wb") as part:
        part.write((tmp_path / OPEN).read_bytes())
    assert [one.member for one in read(tmp_path)] == [0]


def test_a_tail_gives_what_came_since_also_when_a_part_is_closed_meanwhile(tmp_path, episode, monkeypatch):
    kept = EpisodeWriter(tmp_path)

    def append(index, open_bytes=16 << 20):
        monkeypatch.setattr(files, "_OPEN_BYTES", open_bytes)
        kept.append([joined(episode(index), [])])

    append(0, open_bytes=1)
    tail = EpisodeFollower(tmp_path)
    assert tail.news() == []
    append(1)
    assert [one.index for one in tail.news()] == [1]
    append(2, open_bytes=1)
    append(3)
    assert [one.index for one in tail.news()] == [2, 3]
    assert tail.news() == []
    tail.close()


def test_a_tail_waits_for_a_line_to_be_whole(tmp_path, episode):
    tail = EpisodeFollower(tmp_path)
    line = joined(episode(5), []).model_dump_json(exclude_defaults=True).encode()
    (tmp_path / OPEN).write_bytes(line[:30])
    assert tail.news() == []
    with (tmp_path / OPEN).open("ab") as file:
        file.write(line[30:] + b"\n")
    assert [one.index for one in tail.news()] == [5]
    tail.close()


def _text(one, **options: object):
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


def test_the_beginning_of_a_reply_is_shown_once_and_the_whole_prompt_on_request(episode, turn, tmp_path):
    save_tokenizer(tmp_path, 512)
    said = (ChatMessage(role="user", content="x"), ChatMessage(role="assistant", content="ol"))
    one = episode(5, 1)
    record = joined(one, [turn(one, append=said, opening="ol", text="leh", prompt_ids=pack_ids([4, 50, 2, 5]))])
    played, prompts = Played("a/b", record), PromptTexts({("a/b", "policy"): tmp_path})
    lines = [line.rstrip() for line in _text(played).splitlines()]
    assert lines[1:3] == ["  user: x", "  policy: olleh  [stop, 3 tokens]"]
    prompt = f"<|user|>{next(text for text, number in VOCABULARY.items() if number == 50)}<|end|><|assistant|>"
    assert f"\n  prompt: {prompt} " in _text(played, prompts=prompts)
    assert json.loads(as_json(played, prompts))["prompt_texts"] == [prompt]


def test_what_did_not_go_well_is_said_and_what_a_model_wrote_cannot_drive_the_terminal(episode, turn):
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
    one = episode(fault=None)
    call = ReplyPartsMessage(content="", tool_calls=(ToolCallMessage(name="add", arguments="\x1b{}"),), raw="")
    hostile = turn(one, text="\x1b]0;owned\x07 \x1b[2J[bold]not markup[/bold]").model_copy(update={"parts": call})
    text = _text(Played("a/b", joined(one, [hostile])))
    assert "call add \\x1b{}" in text
    assert "\x1b" not in text
    assert "\\x1b]0;owned\\x07" in text
    assert "[bold]not markup[/bold]" in text
    assert visible("a\tb\nc\r\x9b") == "a\tb\nc\\x0d\\x9b"
