"""Sentences about agents that learn nothing: without signal in many steps, or never called. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

_FEW_STEPS = 3


@dataclass(frozen=True, slots=True)
class AgentActivity:
    """What an agent has done so far.

    Attributes:
        version: newest version of its policy; None if it has none yet.
        is_trained: whether steps make versions of it.
        tokens: generated in finished steps and evaluations; None if unknown.
    """

    name: str
    version: int | None = None
    is_trained: bool = True
    tokens: int | None = None


def idle(step: int, agents: Sequence[AgentActivity]) -> list[str]:
    """Return a sentence for each agent that was never called, or for which at least half of the finished steps had no signal.

    Args:
        step: number of finished steps.
        agents: of the job, those that play another one's policy left out.
    """
    if step < _FEW_STEPS:
        return []
    return [text for agent in agents if (text := _idle(step, agent, is_alone=len(agents) == 1))]


def _idle(step: int, agent: AgentActivity, *, is_alone: bool) -> str:
    if not is_alone and agent.tokens == 0:
        lost = ", and has learned nothing" if agent.is_trained else ""
        return f"Agent {agent.name} was called in no episode of {step} steps{lost}: check the environment's conditions for its turn, and what the agents before it reply."
    if not agent.is_trained or agent.version is None or 2 * (step - agent.version) < step:
        return ""
    whose = "" if is_alone else f" for agent {agent.name}"
    return (
        f"{step - agent.version} of {step} steps had no signal{whose}: all episodes of a task earned the same reward (always right, or always wrong), so there "
        "was nothing to learn from them."
    )
