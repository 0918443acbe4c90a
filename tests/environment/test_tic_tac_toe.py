"""Tic-tac-toe's rules: who moves, which replies are legal, results by hand, and the place of past versions."""

import random

import pytest
from tests.environment.playing import play_moves

from marlaas.environment import Split, Task
from marlaas.envs import tic_tac_toe
from marlaas.envs.loading import resolve
from marlaas.envs.playing import Outcome
from marlaas.envs.tic_tac_toe import EMPTY, free, has_won, opening, to_move
from marlaas_api.errors import InvalidInput


@pytest.fixture
def _from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tic_tac_toe, "opening", lambda _: EMPTY)
    monkeypatch.setattr(Task, "draw", lambda self, generate: generate(self.rng))


def play(replies: str, index: int = 0, **args: str) -> tuple[Outcome, list[tuple[str, str]]]:
    return play_moves("tic-tac-toe", args, ["x", "o", *args.values()], replies, Task(Split.TRAIN, index, 7))


@pytest.mark.usefixtures("_from_the_start")
@pytest.mark.parametrize(
    ("replies", "x", "o", "metrics"),
    [
        ("51238", 1, -1, {"illegal": 0, "draw": 0, "x_won": 1}),
        ("153298", -1, 1, {"illegal": 0, "draw": 0, "x_won": 0}),
        ("153287469", 0, 0, {"illegal": 0, "draw": 1, "x_won": 0}),
        ("55", 0, -1, {"illegal": 1, "draw": 0, "x_won": 0}),
        ("51a", -1, 0, {"illegal": 1, "draw": 0, "x_won": 0}),
        ("0", -1, 0, {"illegal": 1, "draw": 0, "x_won": 0}),
    ],
)
def test_results_of_games(replies, x, o, metrics):
    outcome, _ = play(replies)
    assert (outcome.rewards, outcome.metrics) == ({"x": x, "o": o}, metrics)


@pytest.mark.usefixtures("_from_the_start")
def test_an_agent_is_told_the_board_and_its_mark():
    _, told = play("519" + "?")
    assert told == [
        ("x", "ttt: 123456789 x"),
        ("o", "ttt: 1234x6789 o"),
        ("x", "ttt: o234x6789 x"),
        ("o", "ttt: o234x678x o"),
    ]


@pytest.mark.usefixtures("_from_the_start")
def test_past_versions_play_o_in_even_tasks_and_x_in_odd_ones():
    even, odd = (play("51238", index, past="before") for index in (0, 1))
    assert [agent for agent, _ in even[1][:2]] == ["x", "before"]
    assert [agent for agent, _ in odd[1][:2]] == ["before", "o"]
    assert even[0].rewards == {"x": 1, "o": 0, "before": -1}
    assert odd[0].rewards == {"x": 0, "o": -1, "before": 1}


def test_the_agents_that_a_job_must_have_depend_on_the_argument():
    resolve("tic-tac-toe", {}).check_agents(["x", "o"])
    with pytest.raises(InvalidInput, match="needs the agents x, o, past; the job lacks past"):
        resolve("tic-tac-toe", {"past": "past"}).check_agents(["x", "o"])


def test_openings_have_at_most_two_moves_and_nobody_has_won():
    boards = {opening(random.Random(seed)) for seed in range(2000)}
    assert len(boards) == 1 + 9 + 72
    assert all(len(free(board)) >= 7 and not has_won(board, "x") for board in boards)
    assert {to_move(board) for board in boards} == {"x", "o"}
