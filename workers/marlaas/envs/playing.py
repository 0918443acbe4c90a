"""Play one episode with an environment and return its score, or raise its fault.

Runs in the sandbox's child process and in `marlaas env play`. Independent of the bus and of processes.
"""

import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from marlaas.environment import Agents, Score, Task, ToolError, TurnLimit
from marlaas.environment_types import UnknownAgent
from marlaas.envs.loading import Environment
from marlaas.episode_state import EpisodeState, Rewarded

MAX_METRICS = 128
MAX_METRIC_NAME = 64
MAX_NUMBER = 1e30
"""Largest absolute value of a reward or a metric, so that their squares and sums stay finite."""

_OUR_FILES = (
    "marlaas/environment.py",
    "marlaas/async_environment.py",
    "marlaas/envs/playing.py",
    "marlaas/envs/loading.py",
    "asyncio/runners.py",
    "asyncio/base_events.py",
)


class InvalidScore(Exception):
    """The return value of `play` is not a valid score."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A scored episode. `ending` is what the environment can see of its end.

    `choices`: by number, the candidates' rewards. `is_said`: `play` returned a value other than None, or gave an agent a reward other than 0.
    """

    rewards: dict[str, float]
    metrics: dict[str, float]
    ending: Literal["completed", "max_turns", "tool_error"]
    tool_s: float
    is_said: bool = True
    choices: dict[int, list[float]] = field(default_factory=dict)


def play_episode(environment: Environment, task: Task, state: EpisodeState) -> Outcome:
    """Play an episode to its end. Raises InvalidScore, UnknownAgent, and exceptions of the environment that the policy did not cause."""
    ending: Literal["completed", "max_turns", "tool_error"] = "completed"
    returned: object = None
    state.limit(environment.agents_of(task, tuple(state.rewards)))
    try:
        returned = _returned(environment, task, state)
    except TurnLimit:
        ending = "max_turns"
    except ToolError:
        ending = "tool_error"
    except BaseExceptionGroup as group:
        ending = _ending_of(group)
    score = _score(returned, state.rewards)
    is_said = returned is not None or any(state.rewards.values())
    rewards, metrics = _rewards(score, state.rewards), _metrics(score.metrics)
    return Outcome(rewards, metrics, ending, state.tool_s, is_said, _choices(state.choices))


def _returned(environment: Environment, task: Task, state: EpisodeState) -> object:
    if not environment.is_async:
        return environment.play(task, Agents(state))
    from marlaas.async_environment import play_async  # see `loading`

    return play_async(partial(environment.play, task), state)


def _ending_of(group: BaseExceptionGroup[BaseException]) -> Literal["max_turns", "tool_error"]:
    """Return the ending of an episode whose tasks have failed together (asyncio.TaskGroup). Raises the group if the policy did not cause it all."""
    _, others = group.split((TurnLimit, ToolError))
    if others is not None:
        raise group
    return "tool_error" if group.subgroup(ToolError) is not None else "max_turns"


def explain(error: BaseException) -> str:
    """Return the traceback from the environment's own code on. Running out of memory and exit() get an explanatory first line."""
    report = traceback.TracebackException.from_exception(error, limit=-30)
    report.stack = traceback.StackSummary.from_list(_below_ours(list(report.stack)))
    text = "".join(report.format()).rstrip()
    if isinstance(error, MemoryError):
        return f"the environment ran out of memory\n{text}"
    if isinstance(error, SystemExit):
        return f"the environment called exit({error.code!r})\n{text}"
    return text


def _below_ours(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Drop the leading frames that call the environment's code. Frames of ours that it calls stay."""
    ours = [Path(frame.filename).as_posix().endswith(_OUR_FILES) for frame in frames]
    begin = ours.index(True) if True in ours else 0
    while begin < len(frames) and ours[begin]:
        begin += 1
    return frames[begin:]


def _score(returned: object, earned: Mapping[str, float]) -> Score:
    if isinstance(returned, Score):
        return returned
    if returned is None:
        return Score(earned)
    if isinstance(returned, Mapping):
        return Score(returned)
    return Score(_number(returned, "the reward"))


def _rewards(score: Score, earned: Mapping[str, float]) -> dict[str, float]:
    """Return every agent's reward. An agent that the mapping leaves out keeps the reward it has earned."""
    if not isinstance(score.reward, Mapping):
        return dict.fromkeys(earned, _number(score.reward, "the reward"))
    unknown = sorted(set(score.reward) - set(earned))
    if unknown:
        raise UnknownAgent(f"a reward for {unknown[0]!r}, but the job's agents are {', '.join(earned)}")
    given = {**earned, **score.reward}
    return {name: _number(reward, f"the reward of {name!r}") for name, reward in given.items()}


def _choices(choices: Mapping[int, Sequence[Rewarded]]) -> dict[int, list[float]]:
    return {
        number: [_number(candidate.reward, "the reward of a candidate") for candidate in candidates]
        for number, candidates in choices.items()
    }


def _metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    if len(metrics) > MAX_METRICS:
        raise InvalidScore(f"{len(metrics)} metrics; an episode has at most {MAX_METRICS}")
    for name in metrics:
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_METRIC_NAME or not name.isprintable():
            raise InvalidScore(f"a metric's name is 1 to {MAX_METRIC_NAME} printable characters, not {name!r:.80}")
    return {name: _number(value, f"metric {name!r}") for name, value in metrics.items()}


def _number(value: object, what: str) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]  # numpy's scalars are numbers too
    except OverflowError:  # an integer too large for a float
        number = math.inf
    except (TypeError, ValueError):
        raise InvalidScore(f"{what} is {value!r:.80}; expected a number") from None
    if isinstance(value, str) or not abs(number) <= MAX_NUMBER:
        raise InvalidScore(f"{what} is {value!r:.80}; expected a finite number from {-MAX_NUMBER:g} to {MAX_NUMBER:g}")
    return number
