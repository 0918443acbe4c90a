import gzip

import pytest

from marlaas.episodes import files
from marlaas.episodes.files import OPEN, EpisodeFollower, EpisodeWriter, parts, read
from marlaas.episodes.record import joined
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import ChatMessage


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
