"""Playing a named environment with a function as the policy."""

from collections.abc import Callable
from typing import Any

from marlaas.environment import Message, Split, Task
from marlaas.environment_types import TurnRequest
from marlaas.envs.loading import resolve
from marlaas.envs.playing import Outcome, play_episode
from marlaas.envs.scripted import RecordedReplies
from marlaas.episode_state import EpisodeState

Answer = Callable[[TurnRequest], str]


def first_task(split: Split = Split.TRAIN) -> Task:
    """A new one for every play: a task's random numbers are used up by it."""
    return Task(split, 0, 7)


def said(request: TurnRequest) -> str:
    """What the policy was told last."""
    last = request.append[-1]
    assert isinstance(last, Message)
    return last.content


def play(
    name: str, args: dict[str, Any], answer: Answer, task: Task | None = None, max_turns: int = 100
) -> tuple[Outcome, RecordedReplies]:
    channel = RecordedReplies(answer, max_turns)
    state = EpisodeState(["policy"], channel)
    return play_episode(resolve(name, args).create(), task or first_task(), state), channel
