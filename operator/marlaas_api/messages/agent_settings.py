"""The settings of a job's agents in its document; `marlaas_api.kinds` documents the meaning of the fields."""

import math
from collections.abc import Mapping
from typing import Literal

from marlaas_api.messages.base import SpecPart
from marlaas_api.messages.packed import PackedArgs


class NameRef(SpecPart):
    """A reference to a pool or a Secret by its name."""

    name: str


class SftSettings(SpecPart):
    """Supervised fine-tuning in the job's first steps. learning_rate: None is that of the optimizer."""

    data: PackedArgs
    steps: int
    rows_per_step: int = 16
    learning_rate: float | None = None


class InitSettings(SpecPart):
    """What the training begins with. path: a folder that the pool's workers can read; None: a zero adapter."""

    path: str | None = None
    sft: SftSettings | None = None


class AdapterSettings(SpecPart):
    """Shape of an agent's LoRA adapter."""

    rank: int = 8
    alpha: int = 16
    targets: tuple[str, ...] = ()


class AgentOptimizerSettings(SpecPart):
    """Optimizer settings of one agent. None: the job's."""

    learning_rate: float | None = None
    schedule: Literal["constant", "linear", "cosine"] | None = None
    warmup_steps: int | None = None
    min_learning_rate_ratio: float | None = None
    weight_decay: float | None = None
    max_grad_norm: float | None = None


class EntropySettings(SpecPart):
    """Entropy bonus."""

    coefficient: float = 0.0


class AgentTrainingSettings(SpecPart):
    """An agent's own training settings. None: those of the job."""

    optimizer: AgentOptimizerSettings | None = None
    entropy: EntropySettings | None = None


class PolicySettings(SpecPart):
    """The policy of another agent, which an agent plays instead of one of its own.

    window: with `past`, a version is drawn from so many before the newest.
    """

    of: str
    versions: Literal["current", "past"] = "current"
    window: int | None = None

    @property
    def last(self) -> int:
        """Number of versions before the newest among which `past` draws."""
        return 8 if self.window is None else self.window


class RewardShare(SpecPart):
    """A term of a weighted sum of rewards: an agent's reward, and its weight."""

    agent: str
    weight: float = 1.0


class AgentSettings(SpecPart):
    """One agent of the job.

    An agent that plays another one's policy has that one's adapter and pool. trainable: its own turns are trained; never
    those of past versions.
    """

    name: str
    policy: PolicySettings | None = None
    adapter: AdapterSettings = AdapterSettings()
    trainable: bool = True
    pool_ref: NameRef | None = None
    init_from: InitSettings | None = None
    reward_from: tuple[RewardShare, ...] = ()
    training: AgentTrainingSettings | None = None

    @property
    def policy_name(self) -> str:
        """Name of the agent whose policy this one plays; its own name if it has a policy."""
        return self.name if self.policy is None else self.policy.of

    @property
    def plays_past(self) -> bool:
        """Whether it plays past versions of another agent's policy."""
        return self.policy is not None and self.policy.versions == "past"

    @property
    def pinned_as(self) -> str:
        """Name under which its groups are pinned. Agents that play the newest version of one policy share its pins."""
        return self.name if self.plays_past else self.policy_name


def own_weight(agent: AgentSettings) -> float:
    """Return the weight of an agent's own reward in the reward that trains it."""
    if not agent.reward_from:
        return 1.0
    return math.fsum(part.weight for part in agent.reward_from if part.agent == agent.name)


def trained_reward(agent: AgentSettings, rewards: Mapping[str, float]) -> float:
    """Return the reward that trains an agent: its own, or the weighted sum of `reward_from`.

    Args:
        rewards: of an episode, by agent; an absent one is 0.
    """
    if not agent.reward_from:
        return rewards.get(agent.name, 0.0)
    return math.fsum(part.weight * rewards.get(part.agent, 0.0) for part in agent.reward_from)
