"""`bench neighbours`: where a step's time goes, and ratios to peers, against numbers by hand."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench import neighbours
from bench.neighbours import GOOD, PARTS, Steps, attack_rows, newcomer_rows, newcomer_s, parts, plan, ratio_rows

from marlaas.episodes.record import EpisodeRecord, TurnRecord
from marlaas_api.names import Split


def episode(index: int, duration_s: float, split: Split = Split.TRAIN) -> EpisodeRecord:
    turn = TurnRecord(
        agent="policy", turn=0, version=0, append="", text="", stop_reason="stop", queue_s=0.25, engine_s=0.5
    )
    group = f"u1-t{index}"
    names = {"episode": f"{group}-0-1", "group": group, "split": split, "index": index, "member": 0}
    return EpisodeRecord(**names, duration_s=duration_s, tool_s=0.4, turns=(turn, turn))


def test_the_parts_of_a_step_are_those_of_its_slowest_episode_and_the_time_after_it():
    records = [{"indices": [0, 1], "wall_s": 3.0}, {"indices": [2], "wall_s": 4.0}, {"indices": [7], "wall_s": 99.0}]
    episodes = [episode(0, 1.9), episode(1, 2.0), episode(2, 3.0), episode(2, 9.0, Split.EVAL)]
    found = dict(zip(PARTS, parts(records, episodes), strict=True))
    # Elsewhere: 2.0 - 2·0.5 - 2·0.25 - 0.4 = 0.1, and 1.1 in the second step. The third has no episode on record.
    wanted = {"engine": 1.0, "before it": 0.5, "tools": 0.4, "elsewhere": 0.6, "after the episode": 1.0}
    assert found == pytest.approx(wanted)


def test_every_attack_has_a_peer_of_its_own_before_it():
    assert plan(["flood", "nobody", "many", "peer"]) == ["nobody", "peer", "many", "peer", "flood"]
    assert plan(["giant"]) == ["peer", "giant"]
    assert plan(["peer", "nobody"]) == ["nobody", "peer"]
    assert plan(["nobody"]) == ["nobody"]


def test_ratios_over_rounds_are_of_all_steps_with_an_interval():
    peers = [Steps([1.0, 1.0, 1.0], [0.0] * 5), Steps([1.0, 3.0, 1.0], [0.0] * 5)]
    attacks = [Steps([2.0, 2.0, 2.0], [1.0] * 5), Steps([2.0, 2.0, 2.0], [3.0] * 5)]
    found = {"peer": [(one, None) for one in peers], "many": list(zip(attacks, peers, strict=True))}
    peer, many = ratio_rows(found)
    assert peer == ["**peer**", "all", "1.00", "", "", *["0.00"] * 5]
    assert many[:4] == ["**many**", "all", "2.00", "2.00"]
    low, high = map(float, many[4].split(" to "))
    assert low <= high == 2.0
    assert many[5:] == ["2.00"] * 5


def test_measurements_are_kept_and_compared_with_their_peers(tmp_path, monkeypatch):
    seconds = iter((1.0, 2.0, 2.0, 3.0))
    monkeypatch.setattr(neighbours, "measure", lambda *_: Steps([next(seconds)] * 3, [0.0] * 5))
    rows = list(attack_rows(["busy"], 3, 2, tmp_path))
    assert [row[:4] for row in rows] == [
        ["peer", 0, "1.00", ""],
        ["busy", 0, "2.00", "2.00"],
        ["peer", 1, "2.00", ""],
        ["busy", 1, "3.00", "1.50"],
        ["**peer**", "all", "1.50", ""],
        ["**busy**", "all", "2.50", "1.67"],
    ]


def test_newcomers_are_compared_within_their_round(tmp_path, monkeypatch):
    seconds = iter((1.0, 3.0, 2.0, 4.0))
    monkeypatch.setattr(neighbours, "newcomer_s", lambda *_: next(seconds))
    rows = list(newcomer_rows([1, 31], 2, tmp_path))
    assert rows[1] == [31, 0, "3.0", "3.00"]
    assert rows[-1] == ["**31**", "all", "", "2.50 (2.00 to 3.00)"]


def test_a_newcomer_counts_from_its_submission_to_its_first_step(tmp_path, monkeypatch):
    """The others have made three steps by then; the job is submitted at 105 s, and ends steps at 117.5 and 121 s."""
    out, submitted = tmp_path / "scratch" / "run", list[list[str]]()

    def write_steps(namespace: str, name: str, *ends: float) -> None:
        job = out / namespace / name
        job.mkdir(parents=True)
        (job / "steps.jsonl").write_text("".join(json.dumps({"at": at}) + "\n" for at in ends))

    @contextmanager
    def running(objects: list[dict[str, Any]]) -> Iterator[Path]:
        old = [one["metadata"] for one in objects if one["kind"] == "RLJob"]
        write_steps(old[0]["namespace"], old[0]["name"], 101.0, 102.0, 104.0)
        yield out

    def run(command: list[str], **_: Any) -> None:
        submitted.append(command)

    def sleep(_: float) -> None:
        """Let the first steps of the newcomer be found at the second look."""
        assert submitted, "it waits for nothing before"
        write_steps(GOOD, "new", 117.5, 121.0)

    monkeypatch.setattr(neighbours, "running", running)
    monkeypatch.setattr(neighbours, "subprocess", SimpleNamespace(run=run, DEVNULL=None))
    monkeypatch.setattr(neighbours, "time", SimpleNamespace(time=lambda: 105.0, monotonic=lambda: 0.0, sleep=sleep))
    assert [newcomer_s(31, tmp_path / "kept.json") for _ in range(2)] == [12.5, 12.5]
    (command,) = submitted
    assert command[-4:] == ["submit", "--run", str(out), str(out.parent / "new.yaml")]
