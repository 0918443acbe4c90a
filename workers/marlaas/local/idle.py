"""Sentences about agents that learn nothing: many steps trained no token of theirs, or they are never called. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from marlaas_api.messages import UntrainedCause

_FEW_STEPS = 3
_WHY: Mapping[str, str] = {
    UntrainedCause.FLAT: "all episodes of a task earned the same reward (always right, or always wrong)",
    UntrainedCause.OUT_OF_TURNS: "all episodes used up their turns (rollout.maxTurns) and earned the same reward",
    UntrainedCause.FAULTED: "too many episodes ended with a fault",
    UntrainedCause.UNCALLED: "too few episodes called the agent",
    UntrainedCause.STALE: "the groups were too stale (training.maxStaleness)",
    UntrainedCause.FILTERED: "training.overlong.filter left out all replies, which end at a limit (rollout.maxTokens, rollout.maxTurns)",
    UntrainedCause.EMPTY: "no reply has a token: the prompts leave no room in the context window",
    UntrainedCause.MASKED: "training.correction left out all tokens, on which sampler and trainer disagree",
}


@dataclass(frozen=True, slots=True)
class AgentActivity:
    """What an agent has done so far.

    Attributes:
        version: newest version of its policy; None if it has none yet.
        is_trained: whether steps make versions of it.
        tokens: of prompts and replies, in finished steps and evaluations; None if unknown. A teacher has prompts only.
        untrained: number of steps without a new version by cause; empty if unknown.
    """

    name: str
    version: int | None = None
    is_trained: bool = True
    tokens: int | None = None
    untrained: Mapping[str, int] = field(default_factory=dict)


def idle(step: int, agents: Sequence[AgentActivity]) -> list[str]:
    """Return a sentence for each agent that was never called, or for which at least half of the finished steps trained no token.

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
    if not agent.is_trained or agent.version is None:
        return ""
    causes = agent.untrained or {UntrainedCause.FLAT: step - agent.version}
    number = sum(causes.values())
    if 2 * number < step:
        return ""
    whose = "" if is_alone else f" of agent {agent.name}"
    told = [(count, _WHY.get(cause, cause)) for cause, count in sorted(causes.items(), key=lambda one: -one[1])]
    why = told[0][1] if len(told) == 1 else "; ".join(f"in {count}, {text}" for count, text in told)
    return f"{number} of {step} steps trained no token{whose}: {why}."
