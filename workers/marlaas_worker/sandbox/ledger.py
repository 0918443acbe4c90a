"""The supervisor's own record of an episode: its turns, their parents, and its ending.

It does not depend on the child's claims. Pure: no clock, no process, no bus.
"""

import signal
from dataclasses import dataclass, field

from marlaas_api.messages import Ending, FaultClass, StopReason
from marlaas_worker.sandbox.child_messages import BadChildMessage, ScoreMessage, TurnMessage
from marlaas_worker.sandbox.server import Ended

_ENDINGS = {
    "completed": Ending.COMPLETED,
    "max_turns": Ending.MAX_TURNS,
    "tool_error": Ending.TOOL_ERROR,
}


@dataclass(slots=True)
class _Turn:
    agent: str
    parent: int | None


@dataclass(slots=True)
class TurnLedger:
    """The turns of one play, numbered from 0 over all agents.

    tool_rewards: rewards so far, while a tool call is open; else None.
    """

    agents: tuple[str, ...]
    max_turns: int
    tool_rewards: dict[str, float] | None = None
    _turns: list[_Turn] = field(default_factory=list)
    _last_stop: StopReason | None = None
    _was_limited: bool = False

    @property
    def num_turns(self) -> int:
        """Number of generated turns."""
        return len(self._turns)

    def admits(self, asked: TurnMessage) -> bool:
        """Return whether the agent has a turn left.

        Raises:
            BadChildMessage: the parent turn does not exist or belongs to another agent.
        """
        if asked.parent is not None and (
            asked.parent >= len(self._turns) or self._turns[asked.parent].agent != asked.agent
        ):
            raise BadChildMessage(f"agent {asked.agent!r} goes on from turn {asked.parent}, which it never took")
        has_turn = sum(turn.agent == asked.agent for turn in self._turns) < self.max_turns
        self._was_limited |= not has_turn
        return has_turn

    def note(self, asked: TurnMessage, stop: StopReason) -> None:
        """Record a generated turn."""
        self._turns.append(_Turn(asked.agent, asked.parent))
        self._last_stop = stop

    def leaves(self) -> dict[str, tuple[int, ...]]:
        """Return, per agent with turns, its turns that are no other turn's parent."""
        parents = {turn.parent for turn in self._turns}
        return {
            agent: leaves
            for agent in self.agents
            if (leaves := tuple(n for n, turn in enumerate(self._turns) if turn.agent == agent and n not in parents))
        }

    def ending(self, score: ScoreMessage) -> Ending:
        """Return the episode's ending: tool error, turn limit, token limit, or completed."""
        said = _ENDINGS[score.ending]
        if said is not Ending.COMPLETED:
            return said
        if self._was_limited:
            return Ending.MAX_TURNS
        if self._last_stop in (StopReason.LENGTH, StopReason.CONTEXT):
            return Ending.MAX_TOKENS
        return said


@dataclass(frozen=True, slots=True)
class ChildExit:
    """Fault of a child that ended without a score.

    by_policy: if a tool call was open, the policy caused it, and the episode is scored.
    """

    fault: FaultClass
    text: str
    by_policy: bool


def judge(ended: Ended, memory: str) -> ChildExit:
    """Return the fault of an ended child. memory: the limit as in the manifest."""
    if ended.cause == "memory":
        return ChildExit(
            FaultClass.ENV, f"out of memory: the environment held more than {memory} (environment.memory)", True
        )
    if ended.cause == "processes":
        return ChildExit(FaultClass.ENV, "the environment started too many processes", True)
    if ended.status is None:
        return ChildExit(FaultClass.INFRA, f"the sandbox lost the episode: {ended.cause}", False)
    if ended.status == -signal.SIGKILL:
        return ChildExit(
            FaultClass.ENV, "the environment was killed (SIGKILL), perhaps because the machine ran out of memory", False
        )
    if ended.status < 0:
        return ChildExit(FaultClass.ENV, f"the environment died of {signal.Signals(-ended.status).name}", True)
    return ChildExit(
        FaultClass.ENV, f"the environment ended with exit status {ended.status} before it returned a reward", True
    )
