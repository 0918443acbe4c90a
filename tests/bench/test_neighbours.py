"""`bench neighbours`: where a step's time goes, and ratios to peers, against numbers by hand."""

import pytest
from bench.neighbours import PARTS, Steps, parts, ratio_rows

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
