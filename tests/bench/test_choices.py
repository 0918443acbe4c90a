"""`bench agents --only branch`: the three kinds of groups sample the same number of replies, and the figures computed by hand."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from bench import choice_env, choices
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
