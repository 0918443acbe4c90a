"""Play one episode with an environment and return its score, or raise its fault.

Runs in the sandbox's child process and in `marlaas env play`. Independent of the bus and of processes.
"""

import random
import sys
import traceback
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import isawaitable
from pathlib import Path
from typing import Literal

from marlaas.agent_base import AgentBase
from marlaas.environment import Agents, Score, Task, ToolError, TurnLimit
from marlaas.environment_types import Play, ServiceFailed, UnknownAgent
from marlaas.envs.loading import Environment
from marlaas.episode_state import EpisodeState
from marlaas.scores import InvalidScore, data_text, metrics, number
from marlaas_api.errors import first_cause
from marlaas_api.names import derive_seed, digest_of

REPLACED = "replaced_surrogates"
"""The metric that counts requests in which a lone surrogate was replaced; an episode without one lacks it."""
UNSCORED = (
    "`play` returned None and set no reward, so the episode is unscored: it is left out of its group and of all means. "
    "Is a `return` missing?"
)

_OUR_FILES = (
    "marlaas/environment.py",
    "marlaas/async_environment.py",
    "marlaas/envs/playing.py",
    "marlaas/envs/loading.py",
    "asyncio/runners.py",
    "asyncio/base_events.py",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """An episode that was played. `ending` is what the environment can see of its end.

    `tool_error`: the text of the ToolError that ended the episode. `answer`: digest of the policy's answer; empty: none. `choices`: by number, the candidates' rewards. `turn_rewards`: by agent and number of the turn, those that were set; they are part of `rewards`. `data`: JSON text of `Score.data`. `is_scored`: a reward was returned or set, or the policy ended the episode.
    """

    rewards: dict[str, float]
    metrics: dict[str, float]
    ending: Literal["completed", "max_turns", "tool_error"]
    tool_s: float
    tool_error: str = ""
    is_scored: bool = True
    answer: str = ""
    choices: dict[int, list[float]] = field(default_factory=dict)
    turn_rewards: dict[tuple[str, int], float] = field(default_factory=dict)
    data: str = "null"


def seed_generators(task: Task) -> None:
    """Seed the global generators from the task alone, so that all members of a group get the same content.

    Those of libraries that the environment has loaded are seeded too; torch's would otherwise be the same in every episode.
    """
    seed = derive_seed(task.seed, "global", task.split, task.index)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)


def play_episode(environment: Environment, task: Task, state: EpisodeState) -> Outcome:
    """Play an episode to its end. Raises InvalidScore, UnknownAgent, and exceptions of the environment that the policy did not cause."""
    state.limit(environment.agents_of(task, tuple(state.rewards)))
    returned: object = None
    end: TurnLimit | ToolError | None = None
    try:
        returned = _returned(environment, task, state)
    except (TurnLimit, ToolError) as error:
        end = error
    except BaseExceptionGroup as group:
        end = _end_of(group)
    score = _score(returned, state.rewards)
    is_given = score.reward is not None and score.reward is not state.rewards
    return Outcome(
        rewards=state.with_turns(_rewards(score.reward, state.rewards)),
        metrics=metrics(score.metrics) | ({REPLACED: float(state.num_replaced)} if state.num_replaced else {}),
        ending="completed" if end is None else "max_turns" if isinstance(end, TurnLimit) else "tool_error",
        tool_s=state.tool_s,
        tool_error=str(end) if isinstance(end, ToolError) else "",
        is_scored=end is not None or is_given or state.is_rewarded,
        answer="" if score.answer is None else digest_of(str(score.answer)),
        choices={at: [candidate.reward for candidate in candidates] for at, candidates in state.choices.items()},
        turn_rewards=dict(state.turn_rewards),
        data=data_text(score.data),
    )


def score_group(
    environment: Environment, task: Task, plays: Sequence[Play]
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Have the environment compare the episodes of a group; return rewards and metrics of each.

    A score's metrics are added to those of the play; an agent that it leaves out keeps its reward.

    Raises InvalidScore (also: not one score for each play), UnknownAgent, and exceptions of the environment.
    """
    returned = environment.score_group(task, plays)
    if isawaitable(returned):
        import asyncio  # see `loading`

        returned = asyncio.run(_awaited(returned))
    if isinstance(returned, str | Mapping) or not isinstance(returned, Iterable):
        raise InvalidScore(f"`score_group` returned {returned!r:.80}; expected a list with a score for each episode")
    scores = [Score(None) if one is None else _score(one, {}) for one in returned]
    if len(scores) != len(plays) or any(score.reward is None for score in scores):
        raise InvalidScore(
            f"`score_group` returned {len(scores)} scores for {len(plays)} episodes, or None among them; expected one for each"
        )
    return [
        (_rewards(score.reward, play.rewards), {**play.metrics, **metrics(score.metrics)})
        for score, play in zip(scores, plays, strict=True)
    ]


async def _awaited(returned: Awaitable[object]) -> object:
    return await returned


def _returned(environment: Environment, task: Task, state: EpisodeState) -> object:
    if not environment.is_async:
        environment.start_episode(task)
        return environment.play(task, Agents(state))
    from marlaas.async_environment import play_async  # see `loading`

    return play_async(partial(_started, environment, task), state)


async def _started(environment: Environment, task: Task, agents: Mapping[str, AgentBase]) -> object:
    begun = environment.start_episode(task)
    if isawaitable(begun):
        await begun
    return await environment.play(task, agents)


def _end_of(group: BaseExceptionGroup[BaseException]) -> TurnLimit | ToolError:
    """Return the end of an episode whose tasks have failed together (asyncio.TaskGroup).

    If the policy did not cause it all, raises the ServiceFailed that did, or the group.
    """
    causes, others = group.split((TurnLimit, ToolError))
    if others is not None:
        services, rest = others.split(ServiceFailed)
        raise group if services is None or rest is not None else first_cause(services)
    failed = group.subgroup(ToolError)
    end = first_cause(failed or group)
    assert isinstance(end, TurnLimit | ToolError), causes
    return end


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
    return Score(number(returned, "the reward"))


def _rewards(reward: object, earned: Mapping[str, float]) -> dict[str, float]:
    """Return every agent's reward. An agent that the mapping leaves out keeps the reward it has earned; None leaves out all."""
    if reward is None:
        return dict(earned)
    if not isinstance(reward, Mapping):
        return dict.fromkeys(earned, number(reward, "the reward"))
    unknown = sorted(set(reward) - set(earned))
    if unknown:
        raise UnknownAgent(f"a reward for {unknown[0]!r}, but the job's agents are {', '.join(earned)}")
    given = {**earned, **reward}
    return {name: number(value, f"the reward of {name!r}") for name, value in given.items()}
