"""Playing without a model: a script answers for the policy."""

from collections.abc import Callable

import pytest

from marlaas.environment import Split, Task
from marlaas.envs.loading import Environment
from marlaas.envs.playing import Outcome, play_episode
from marlaas.envs.scripted import RecordedReplies, ScriptedReplies
from marlaas.episode_state import EpisodeState

Play = Callable[..., tuple[Outcome, RecordedReplies]]


@pytest.fixture
def play() -> Play:
    """Play a function `play(task, agent)` against replies in order."""

    def run(
        code: Callable[..., object], *replies: str, agents: tuple[str, ...] = ("policy",), max_turns: int = 8
    ) -> tuple[Outcome, RecordedReplies]:
        channel = ScriptedReplies(replies, max_turns)
        environment = Environment(code, takes_all_agents=len(agents) > 1)
        return play_episode(environment, Task(Split.TRAIN, 0, 7), EpisodeState(agents, channel)), channel

    return run
