"""Running means of rewards, against numbers computed by hand."""

import pytest
from tests.trainer.test_trajectories import turn
from tests.trainer.test_weighing import played

from marlaas_api.messages.job_spec import BaselineSettings
from marlaas_worker.trainer.weighing import Baselines, Weighing

RUNNING = BaselineSettings(type="running-mean", decay=0.75)


def steps_of(baselines: Baselines, *steps: dict[str, list[float]]) -> list[dict[str, float]]:
    found = []
    for rewards in steps:
        baselines.note(rewards)
        found.append(baselines.finish_step())
    return found


def test_each_player_has_its_own_which_begins_at_the_first_mean_and_moves_by_a_quarter_when_it_plays():
    found = steps_of(Baselines(RUNNING), {"": [2.0, 0.0], "second": [-1.0]}, {"": [0.0]}, {"second": [1.0]})
    assert found == [
        {"baseline": 1.0, "baseline_second": -1.0},
        {"baseline": 0.75, "baseline_second": -1.0},
        {"baseline": 0.75, "baseline_second": -0.5},
    ]


def test_a_restart_takes_the_values_from_the_versions_metrics_and_repeats_the_step():
    first = Baselines(RUNNING)
    (metrics,) = steps_of(first, {"": [1.0], "second": [3.0]})
    again = Baselines(RUNNING)
    again.restore({"loss": 1.0, **metrics})
    again.note({"": [99.0]})
    again.rewind()
    assert again.values == first.values == {"": 1.0, "second": 3.0}
    assert steps_of(again, {"": [0.0]}) == steps_of(first, {"": [0.0]})


def test_candidates_do_not_move_it_and_a_job_that_compares_groups_has_none():
    baselines = Baselines(RUNNING)
    baselines.note({"": [1.0], ("", "episode", 0): [5.0, 6.0]})
    assert baselines.finish_step() == {"baseline": 1.0}
    plain = Baselines(BaselineSettings())
    plain.note({"": [1.0]})
    assert plain.finish_step() == {}
    assert not plain._step, "rewards of a job without baselines are not kept"
    plain.restore({"baseline": 1.0})
    assert plain.values == {}


@pytest.mark.parametrize(("baselines", "expected"), [({}, [2.0, 3.0]), ({"": 0.5, "second": 4.0}, [1.5, -1.0])])
def test_an_advantage_is_the_reward_minus_the_players_baseline_also_of_one_episode(baselines, expected):
    group = [played(2.0, turn(0)), played(3.0, turn(0), compared_with="second")]
    (parts,) = Weighing("standardised", 4, 0, has_baseline=True).segments([group], baselines)
    assert [part.advantage for part in parts] == expected
    overlong = Weighing("standardised", max_tokens=2, overlong_tokens=2, has_baseline=True)
    assert overlong.rewards(group) == {"": [1.0], "second": [2.0]}, "the penalty of a long turn is part of the reward"


def test_candidates_are_still_compared_with_each_other():
    group = [played(reward, turn(0), compared_with=("", "episode", 0)) for reward in (1.0, 0.0)]
    (parts,) = Weighing("centred", 4, 0, has_baseline=True).segments([group], {"": 9.0})
    assert [part.advantage for part in parts] == [0.5, -0.5]
