"""One play of one member of a group, from its task to its Episode."""

import time
from dataclasses import dataclass
from typing import Any

from marlaas_api import names
from marlaas_api.messages import Ending, Episode, FaultClass, JobDocument, TaskMessage
from marlaas_api.names import Split
from marlaas_worker.sandbox.faults import Fault, bounded
from marlaas_worker.sandbox.server import BrokenEnvironment, Children, ForkServerLost
from marlaas_worker.sandbox.session import ChildSession
from marlaas_worker.sandbox.turns import TurnClient

MAX_DELIVERIES = 10
"""Deliveries of a task after which its members are given up unplayed.

More than the default backoffLimit: a task whose memory use kills every sandbox fails the job first, and its status gives the reason.
"""


@dataclass(frozen=True, slots=True)
class AttemptDependencies:
    """The objects that all attempts of a job share: its document, its child processes, and the client for turns."""

    document: JobDocument
    children: Children
    turns: TurnClient


class Attempt:
    """One play of one member of a group. A group is the G episodes of one task, and a member is one of them.

    Call `play` once.

    Args:
        dependencies: shared by all attempts of the job.
        task: the group's task.
        member: number of the member in the group.
        number: number of this play, unique among the member's plays; it is part of the episode's id.

    Attributes:
        is_retryable: whether another attempt may succeed, if this one had a fault.
        data: JSON text of `Score.data`, if the episode is to be compared with those of its group; None: it is not, or its play is not over.
    """

    def __init__(self, dependencies: AttemptDependencies, task: TaskMessage, member: int, number: int) -> None:
        self.is_retryable = True
        self.data: str | None = None
        self._children = dependencies.children
        episode = names.episode_id(task.group, member, number)
        self._blank = unplayed(task, member, episode)
        self._credits_turns = task.split is Split.TRAIN and dependencies.document.spec.training.credits_turns
        self._session = ChildSession(dependencies.document, dependencies.turns, task, member, episode)

    @property
    def has_asked(self) -> bool:
        """Whether any turn was requested under this attempt's episode id."""
        return self._session.ledger.has_begun

    async def play(self, prior_faults: tuple[FaultClass, ...]) -> Episode:
        """Play and return an Episode. A Fault is recorded in the Episode, not raised. prior_faults: classes of the member's earlier faults."""
        started = time.monotonic()
        try:
            result = await self._scored()
            await self._session.ask_teacher()
        except Fault as fault:
            self.is_retryable, self.data = fault.is_retryable, None
            result = {
                "fault": fault.fault,
                "fault_text": bounded(str(fault)),
                "is_permanent": fault.is_permanent,
            }
        ended = {"prior_faults": prior_faults, "duration_s": time.monotonic() - started}
        ledger = self._session.ledger
        counts = {"num_turns": ledger.num_turns, "num_tokens": ledger.num_tokens}
        counts |= {"num_cut": ledger.num_cut, "num_overtime": ledger.num_overtime}
        return self._blank.model_copy(update={**ended, **result, **counts})

    async def _scored(self) -> dict[str, Any]:
        """Play, and return the Episode's fields that are known only after a play without a fault, such as the rewards. Raises Fault."""
        session, output = self._session, None
        try:
            async with self._children.child() as child:
                output = child.output
                score = await session.run(child)
            self.data = score.compared_by
            return {
                "ending": session.ledger.ending(score),
                "rewards": score.rewards,
                "metrics": score.metrics,
                "tool_s": score.tool_s,
                "tool_error": bounded(score.tool_error),
                "prompt": session.ledger.prompt(score.content),
                "answer": score.answer,
                **self._turns(),
            }
        except Fault as fault:
            if fault.by_policy and session.ledger.tool_rewards is not None:
                return self._tool_error(session.ledger.tool_rewards, bounded(str(fault)))
            printed = output.text() if output is not None else ""
            text = f"{fault}\noutput: {printed}" if printed else str(fault)
            raise Fault(fault.fault, text, is_permanent=fault.is_permanent, is_retryable=fault.is_retryable) from fault
        except BrokenEnvironment as error:
            raise Fault(error.fault, str(error), is_permanent=error.is_permanent) from error
        except ForkServerLost as error:
            raise Fault(FaultClass.INFRA, str(error)) from error

    def _tool_error(self, rewards: dict[str, float], text: str) -> dict[str, Any]:
        known = {"rewards": rewards, "metrics": {}, "tool_s": self._session.tool_s, "tool_error": text}
        return {"ending": Ending.TOOL_ERROR, **known, **self._turns()}

    def _turns(self) -> dict[str, Any]:
        ledger = self._session.ledger
        turn_rewards = ledger.turn_rewards() if self._credits_turns else {}
        known = {"choices": ledger.choices(), "may_speak": ledger.may_speak, "turn_rewards": turn_rewards}
        return {"leaves": ledger.leaves(), **known}


def unplayed(task: TaskMessage, member: int, episode: str) -> Episode:
    """Return an Episode with only the fields that are known before its play. member: number in the group. episode: the Episode's id."""
    return Episode(
        namespace=task.namespace,
        job=task.job,
        uid=task.uid,
        group=task.group,
        split=task.split,
        index=task.index,
        member=member,
        episode=episode,
    )


def given_up(task: TaskMessage, member: int, attempt: int) -> Episode:
    """Return an Episode with an INFRA fault, for a member of a task that was delivered more than `MAX_DELIVERIES` times.

    Otherwise a task that crashes its sandbox would be redelivered forever. Deliveries that a sandbox gave back when it was stopped, or
    lost in an outage of the bus, count too.

    member: number in the group. attempt: number of the play for the Episode's id.
    """
    text = f"its task was claimed {MAX_DELIVERIES} times and never finished: its sandboxes crashed, stopped or lost the bus"
    blank = unplayed(task, member, names.episode_id(task.group, member, attempt))
    return blank.model_copy(update={"fault": FaultClass.INFRA, "fault_text": text})
