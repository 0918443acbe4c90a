"""What the supervisor knows of an episode, whatever the child says: its turns, how they hang together, how it ended.

Pure: values in, values out; no clock, no process, no bus.
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
    """The turns of one play, numbered from 0 over all agents, and the rewards known while a tool runs."""

    agents: tuple[str, ...]
    max_turns: int
    tool_rewards: dict[str, float] | None = None
    _turns: list[_Turn] = field(default_factory=list)
    _last_stop: StopReason | None = None
    _was_limited: bool = False

    @property
    def num_turns(self) -> int:
        """Turns that were generated."""
        return len(self._turns)

    def admits(self, asked: TurnMessage) -> bool:
        """Say whether the agent has a turn left. Raises BadSaying when the turn it goes on from is not its own."""
        if asked.parent is not None and (
            asked.parent >= len(self._turns) or self._turns[asked.parent].agent != asked.agent
        ):
            raise BadChildMessage(f"agent {asked.agent!r} goes on from turn {asked.parent}, which it never took")
        has_turn = sum(turn.agent == asked.agent for turn in self._turns) < self.max_turns
        self._was_limited |= not has_turn
        return has_turn

    def note(self, asked: TurnMessage, stop: StopReason) -> None:
        """Book a generated turn."""
        self._turns.append(_Turn(asked.agent, asked.parent))
        self._last_stop = stop

    def leaves(self) -> dict[str, tuple[int, ...]]:
        """Return, per agent that took turns, those from which none goes on."""
        parents = {turn.parent for turn in self._turns}
        return {
            agent: leaves
            for agent in self.agents
            if (leaves := tuple(n for n, turn in enumerate(self._turns) if turn.agent == agent and n not in parents))
        }

    def ending(self, score: ScoreMessage) -> Ending:
        """Return how the policy's side ended: its tool broke, it ran out of turns, out of tokens, or none of these."""
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
    """How a child without a score is judged. by_policy: it would be scored if it happened in a tool call."""

    fault: FaultClass
    text: str
    by_policy: bool


def judge(ended: Ended, memory: str) -> ChildExit:
    """Say what a child died of: `memory` is the limit as the manifest has it."""
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
