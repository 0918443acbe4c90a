"""Figures of several measurements, by hand."""

import shutil
from pathlib import Path

import pytest
import yaml
from bench import multitenant_env, quality
from bench.neighbours import GOOD, PARTS, objects_of, parts
from bench.rounds import bootstrap

from marlaas.episodes.record import EpisodeRecord, TurnRecord
from marlaas.local.documents import read
from marlaas_api.names import Split


def test_the_interval_holds_the_ratio_and_is_a_point_without_noise():
    assert bootstrap([[3.0, 3.0]], [[2.0, 2.0]]) == (1.5, 1.5)
    low, high = bootstrap([[2.0, 2.1, 1.9, 2.2], [2.0, 2.3, 1.8, 2.0]], [[1.0, 1.1, 0.9, 1.0], [1.0, 1.2, 0.8, 1.0]])
    assert 1.5 < low < 2.0 < high < 2.5


def test_the_difference_is_paired_by_job():
    alone = {"a": (0.1, 0.9), "b": (0.3, 0.7)}
    together = {"b": (0.3, 0.65), "a": (0.1, 0.93)}
    found = quality.row("0", alone, together)
    # Differences 0.03 and -0.05: mean -0.01, standard deviation 0.08 / √2, standard error 0.04.
    assert found == ["0", "2", "0.200", "0.800", "0.790", "-0.0100", "0.0400", "met"]
    assert quality.row("0", alone, {job: (0.0, after + 0.021) for job, (_, after) in alone.items()})[-1] == "missed"


def episode(index: int, duration_s: float, split: Split = Split.TRAIN) -> EpisodeRecord:
    spent = {"queue_s": 0.25, "engine_s": 0.5}
    turn = TurnRecord(agent="policy", turn=0, version=0, append="", text="", stop_reason="stop", **spent)
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


def test_the_well_behaved_job_has_a_tenant_of_its_own(tmp_path: Path):
    file = tmp_path / "jobs.yaml"
    shutil.copy(str(multitenant_env.__file__), tmp_path)
    file.write_text(yaml.safe_dump_all(objects_of("peer")))
    found = [(job.namespace, job.tenant) for job in read([str(file)], seed=0).jobs]
    assert sorted(found) == [(GOOD, GOOD), *[("team-other", "team-other")] * 8]
