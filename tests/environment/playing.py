"""Playing a named environment with a function as the policy, and a function as an environment."""

from collections.abc import Callable, Iterable, Sequence
from inspect import iscoroutinefunction
from typing import Any

from tests.environment.channels import OrderedReplies

from marlaas.environment import Message, Split, Task
from marlaas.environment_types import TurnRequest
from marlaas.envs.loading import Environment, resolve
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


def played(code: Callable[..., Any], channel: OrderedReplies | None = None, *, is_strict: bool = True) -> Outcome:
    """Play `code` as the environment of the agents a and b."""
    state = EpisodeState(["a", "b"], channel or OrderedReplies(), is_strict=is_strict)
    return play_episode(Environment(code, True, is_async=iscoroutinefunction(code)), first_task(), state)


def play_moves(
    name: str, args: dict[str, Any], agents: Sequence[str], replies: Iterable[str], task: Task
) -> tuple[Outcome, list[tuple[str, str]]]:
    """Play a game with these replies, each in a conversation of its own; return also each turn's agent and message."""
    left, told = iter(replies), []

    def answer(request: TurnRequest) -> str:
        assert request.parent is None, "each turn is a conversation of its own"
        (message,) = request.append
        assert isinstance(message, Message)
        told.append((request.agent, message.content))
        return next(left)

    outcome = play_episode(resolve(name, args).create(), task, EpisodeState(agents, RecordedReplies(answer, 5)))
    assert list(left) == [], "the game ended before the last reply"
    return outcome, told
