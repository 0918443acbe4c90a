"""`bench agents --only branch`: the three kinds of groups sample the same number of replies, and the figures computed by hand."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from bench import choice_env, choices
from bench.agent_stages import mean_step_s, pipeline, told
from tests.environment.playing import said

from marlaas.environment import Agents, Task
from marlaas.environment_types import Split, TurnRequest
from marlaas.envs.loading import Environment
from marlaas.envs.playing import Outcome, play_episode
from marlaas.envs.scripted import RecordedReplies
from marlaas.episode_state import EpisodeState
from marlaas.manifest import load
from marlaas.models.curriculum import calculator_task, reverse_task
from marlaas_api.names import derive_seed


def play(task: Task, args: dict[str, Any], *, call: bool = True) -> tuple[Outcome, RecordedReplies]:
    seed = derive_seed(task.seed, task.index)
    word, puzzle = reverse_task(task.split, seed), calculator_task(task.split, seed)
    right = {word.prompt: word.answer, puzzle.prompt: puzzle.call if call else "no", puzzle.answer: puzzle.answer}

    def answer(request: TurnRequest) -> str:
        return right[said(request)]

    channel = RecordedReplies(answer, 100)

    def environment(task: Task, agents: Agents) -> object:
        return choice_env.play(task, agents["policy"], **args)

    return play_episode(Environment(environment, True), task, EpisodeState(["policy"], channel)), channel


@pytest.mark.parametrize("name", choices.VARIANTS)
def test_every_kind_of_group_samples_as_many_replies(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(choice_env.__file__).parent))
    _, job = choices.variant(name)
    outcome, channel = play(Task(Split.TRAIN, 0, 7), job["spec"]["environment"]["args"])
    assert outcome.rewards == {"policy": 1.0}
    assert len(channel.asked) * job["spec"]["rollout"]["groupSize"] == 24
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    load([path], runnable=False)


def test_candidates_are_rewarded_and_held_out_tasks_have_none() -> None:
    args = {"candidates": 4, "branched": [choice_env.DECISION]}
    outcome, _ = play(Task(Split.TRAIN, 0, 7), args)
    assert outcome.choices == {0: [1.0] * 4}
    outcome, channel = play(Task(Split.EVAL, 0, 7), args)
    assert (len(channel.asked), outcome.choices) == (3, {})


def test_without_the_right_call_there_is_no_reward() -> None:
    outcome, channel = play(Task(Split.TRAIN, 0, 7), {}, call=False)
    assert (outcome.rewards, len(channel.asked)) == ({"policy": 0.0}, 2)
    assert outcome.metrics == {"spelled": 1.0, "called": 0.0}


def test_a_row_names_the_first_steps_at_the_goal_and_a_picture_is_drawn(tmp_path: Path) -> None:
    found = {"tokens": 12.6, "evals": [[0, 0.1, 0.3], [3, 0.7, 0.8], [6, 0.9, 0.7]]}
    assert choices.row("turns", 1, found) == ["turns", 1, "13", "0.100", "0.900", 6, 3]
    assert choices.row("turns", 1, found | {"evals": found["evals"][:1]})[-2:] == ["never", "never"]
    choices.draw({(name, 0): found for name in choices.VARIANTS}, tmp_path / "choices.png")
    assert (tmp_path / "choices.png").read_bytes()[:4] == b"\x89PNG"


def test_ratios_of_simulated_stages_are_medians_of_the_rounds() -> None:
    assert mean_step_s([5.0, 7.0, 8.0, 9.0, 12.0], 2) == 2.0
    assert told("strict", [2.2, 3.0, 2.3], [2.0, 2.0, 2.0]).startswith("strict: 1.15x (rounds: 1.10, 1.50, 1.15; ")
    assert told("strict", [2.0], [2.0]).endswith("missed")


def test_a_micro_batch_of_the_pipeline_is_smaller_than_a_group() -> None:
    for mode in pipeline():
        assert mode.spec()["training"]["microbatchTokens"] < 4 * max(mode.agents.values())
