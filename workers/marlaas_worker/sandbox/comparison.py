"""Rewards of a group whose environment compares its episodes: once all are played, a child of its own runs `score_group`."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from marlaas_api.messages import Episode, FaultClass, TaskMessage
from marlaas_worker.sandbox.attempt import AttemptDependencies, unplayed
from marlaas_worker.sandbox.channel import BadFrame
from marlaas_worker.sandbox.faults import Fault, bounded
from marlaas_worker.sandbox.ledger import ComparedMessage
from marlaas_worker.sandbox.server import BrokenEnvironment, ForkServerLost
from marlaas_worker.sandbox.session import compared

_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Withheld:
    """A played episode that is published only after the environment has compared its group.

    Attributes:
        episode: the Episode, with the rewards of its play, which the comparison replaces.
        data: JSON text of the play's `Score.data`, an input of the comparison.
    """

    episode: Episode
    data: str


async def compare(dependencies: AttemptDependencies, task: TaskMessage, group: Sequence[Withheld]) -> list[Episode]:
    """Have a child compare the episodes of a group, and return them with the rewards and metrics of the comparison.

    After a retryable fault, the comparison is repeated: `environment.maxAttempts` attempts in all. If none succeeds, or a fault
    is not retryable, all episodes are returned with the last fault and without rewards.

    group: the episodes of the task to compare.
    """
    plays = [{"rewards": one.episode.rewards, "metrics": one.episode.metrics, "data": one.data} for one in group]
    left = dependencies.document.spec.environment.max_attempts
    while True:
        left -= 1
        started = time.monotonic()
        try:
            found = await _compared(dependencies, task, plays)
            return [_scored(one.episode, *score) for one, score in zip(group, found.scores, strict=True)]
        except Fault as fault:
            if left <= 0 or not fault.is_retryable:
                seconds = time.monotonic() - started
                return [_faulted(task, one.episode, fault, seconds) for one in group]
            if fault.fault is not FaultClass.ENV:
                await asyncio.sleep(_PAUSE_S)


async def _compared(
    dependencies: AttemptDependencies, task: TaskMessage, plays: Sequence[dict[str, Any]]
) -> ComparedMessage:
    """Have a child compare the plays of a group, once. plays: as of `session.compared`. Raises Fault."""
    try:
        async with dependencies.children.child() as child:
            return await compared(child, dependencies.document, task, plays)
    except BadFrame as error:
        text = f"the data of {len(plays)} episodes for `score_group` is too long: {error}; shorten `Score.data`"
        raise Fault(FaultClass.ENV, text, is_retryable=False) from error
    except BrokenEnvironment as error:
        fault = FaultClass.ENV if error.fault is FaultClass.ENV else FaultClass.INFRA
        raise Fault(fault, str(error), is_permanent=error.is_permanent) from error
    except ForkServerLost as error:
        raise Fault(FaultClass.INFRA, str(error)) from error


def _scored(episode: Episode, rewards: dict[str, float], metrics: dict[str, float]) -> Episode:
    return episode.model_copy(update={"rewards": rewards, "metrics": metrics})


def _faulted(task: TaskMessage, episode: Episode, fault: Fault, seconds: float) -> Episode:
    kept = episode.model_dump(include={"prior_faults", "num_turns", "num_tokens", "num_cut", "num_overtime"})
    texts = {"fault": fault.fault, "fault_text": bounded(f"the comparison of the group: {fault}")}
    times = {"is_permanent": fault.is_permanent, "duration_s": episode.duration_s + seconds}
    return unplayed(task, episode.member, episode.episode).model_copy(update={**kept, **texts, **times})
