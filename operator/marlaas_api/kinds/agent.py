"""The agents of a job: each is one policy with an adapter of its own."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from marlaas_api.kinds.base import Distinct, DnsLabel, PathText, Spec, list_map, matching, rules
from marlaas_api.kinds.objective import EntropySpec
from marlaas_api.kinds.optimizer import AgentOptimizer
from marlaas_api.kinds.sizes import args_problem

LayerName = Annotated[
    str, matching(r"^[A-Za-z_][A-Za-z0-9_]*$", "the last component of a linear layer's name, for example q_proj", 64)
]

_NOTHING_TO_BEGIN_WITH = "initFrom needs path, an adapter, or sft, demonstrations; give one of them, or remove initFrom"
_WINDOW_IS_PAST = "window needs versions: past; remove window, or choose past"
_OF_POLICY = "an agent with policy has the adapter, pool and training of the agent that it names; remove adapter, trainable, poolRef, initFrom and training"
_POLICY_IS_ANOTHERS = (
    "!has(self.policy) || (self.trainable && !(has(self.poolRef) || has(self.initFrom) || has(self.training)) "
    "&& self.adapter.rank == 8 && self.adapter.alpha == 16 && (!has(self.adapter.targets) || self.adapter.targets.size() == 0))"
)


def _no_all_linear(value: object) -> object:
    """Refuse PEFT's word for all linear layers, which is the default here."""
    if value == "all-linear" or (isinstance(value, (list, tuple)) and "all-linear" in value):
        raise ValueError("all-linear is what leaving it out means: remove targets to adapt all linear layers")
    return (
        tuple(value) if isinstance(value, list) else value
    )  # strict: pydantic takes a list from JSON, but not from a validator


class PoolRef(Spec):
    """Reference to a ModelPool by name."""

    name: DnsLabel = Field(description="Name of the ModelPool.")


class AdapterSpec(Spec):
    """The LoRA adapter that is trained. Its scale is alpha / rank; choose a power of two, which is exact in every dtype."""

    rank: int = Field(
        8,
        ge=1,
        le=512,
        description="Rank of the LoRA matrices; at most the pool's maxRank. 8 is enough for most RL tasks.",
    )
    alpha: int = Field(
        16,
        ge=1,
        le=4096,
        description="LoRA alpha. The adapter's output is scaled by alpha / rank; the defaults give 2.",
    )
    targets: Annotated[Distinct[LayerName], BeforeValidator(_no_all_linear)] = Field(
        (),
        max_length=64,
        description="Linear layers to adapt, each by the last component of its module name, for example q_proj; empty adapts all linear layers.",
    )


def _small(data: dict[str, Any]) -> dict[str, Any]:
    if problem := args_problem(data, "data"):
        raise ValueError(problem)
    return data


class SftSpec(Spec):
    """Supervised fine-tuning on a data set, in the job's first steps. The steps after them begin with its result, and with new optimizer moments."""

    data: Annotated[dict[str, Any], AfterValidator(_small)] = Field(
        description="What is demonstrated, as arguments of the environment dataset: source, and prompt with completion, or messages; at most 64 KiB as text.",
        max_length=256,
    )
    steps: int = Field(
        ge=1,
        le=10_000_000,
        description="Number of the job's first steps that train demonstrations, at most training.steps. The rows are trained in their order, and begin again "
        "after the last one.",
    )
    rows_per_step: int = Field(16, ge=1, le=4096, description="Number of rows in one step.")
    learning_rate: float | None = Field(
        None,
        ge=0,
        le=10,
        description="Learning rate of these steps, without warm-up and decay. Absent: that of the optimizer.",
    )


class InitFrom(Spec):
    """What the training begins with: an adapter in PEFT format that becomes version 0, supervised fine-tuning, or the one and then the other."""

    model_config = ConfigDict(json_schema_extra=rules(("has(self.path) || has(self.sft)", _NOTHING_TO_BEGIN_WITH)))
    path: PathText | None = Field(
        None,
        description="Folder with adapter_config.json and adapter_model.safetensors; the pool's workers must be able to read it. Absent: a zero adapter.",
    )
    sft: SftSpec | None = Field(
        None,
        description="Supervised fine-tuning before the other steps (docs/how-to/sft.md). At most one agent of a job has it. The version that it ends with is then "
        "the reference of a KL penalty that names no other. Absent: none.",
    )

    @model_validator(mode="after")
    def _begins_with_something(self) -> Self:
        if self.path is None and self.sft is None:
            raise ValueError(_NOTHING_TO_BEGIN_WITH)
        return self


class AgentTraining(Spec):
    """What differs from the job's `training` section for one agent. The algorithm, the data and the steps are the job's."""

    optimizer: AgentOptimizer | None = Field(None, description="Optimizer settings of this agent. Absent: the job's.")
    entropy: EntropySpec | None = Field(None, description="Entropy bonus of this agent. Absent: the job's.")


class PolicySpec(Spec):
    """The policy of another agent, which this agent plays instead of one of its own."""

    model_config = ConfigDict(
        json_schema_extra=rules(("!has(self.window) || self.versions == 'past'", _WINDOW_IS_PAST))
    )
    of: DnsLabel = Field(description="Name of the agent whose policy it is.")
    versions: Literal["current", "past"] = Field(
        "current",
        description="current: the version that the other agent plays; the turns of both train the policy. past: an earlier version, drawn anew for "
        "each step; its turns are not trained.",
    )
    window: int | None = Field(
        None,
        ge=1,
        le=10_000,
        description="Number of versions before the newest among which `past` draws, all equally likely. Absent: 8.",
    )

    @model_validator(mode="after")
    def _window_is_past(self) -> Self:
        if self.window is not None and self.versions != "past":
            raise ValueError(_WINDOW_IS_PAST)
        return self


class RewardPart(Spec):
    """One agent's reward within the reward of another, or of its own."""

    agent: DnsLabel = Field(description="Name of the agent whose reward it is.")
    weight: float = Field(1.0, ge=-1000, le=1000, description="Factor of the reward.")


class AgentSpec(Spec):
    """One agent of the job, by default with a policy and an adapter of its own."""

    model_config = ConfigDict(json_schema_extra=rules((_POLICY_IS_ANOTHERS, _OF_POLICY)))
    name: DnsLabel = Field(description="Name of the agent, by which environments request its turns.")
    policy: PolicySpec | None = Field(
        None,
        description="The policy of another agent, which this agent plays. Absent: the agent has a policy of its own.",
    )
    adapter: AdapterSpec = Field(default_factory=AdapterSpec, description="The LoRA adapter that is trained.")
    trainable: bool = Field(
        True,
        description="False freezes the agent at version 0: the base model, or the adapter of initFrom. At least one agent of a job is trainable.",
    )
    pool_ref: PoolRef | None = Field(
        None, description="Pool that serves and trains this agent. Absent: the job's pool."
    )
    init_from: InitFrom | None = Field(
        None,
        description="Initial adapter, or demonstrations to begin with. Absent: a zero adapter; the policy then equals the base model.",
    )
    reward_from: Annotated[tuple[RewardPart, ...], Field(max_length=16)] = Field(
        (),
        description="Weighted sum of the agents' rewards with which this agent is trained. Evaluations report the environment's rewards. Absent: the agent's own "
        "reward.",
        json_schema_extra=list_map("agent"),
    )
    training: AgentTraining | None = Field(
        None, description="Training settings of this agent that differ from the job's. Absent: the job's."
    )

    @property
    def policy_name(self) -> str:
        """Name of the agent whose policy this one plays; its own name if it has a policy."""
        return self.name if self.policy is None else self.policy.of

    @model_validator(mode="after")
    def _rewards_differ(self) -> Self:
        names = [part.agent for part in self.reward_from]
        if len(set(names)) < len(names):
            raise ValueError("rewardFrom names an agent twice; add its weights")
        return self

    @model_validator(mode="after")
    def _policy_is_anothers(self) -> Self:
        given = (self.pool_ref, self.init_from, self.training)
        if self.policy is not None and (self.adapter != AdapterSpec() or not self.trainable or any(given)):
            raise ValueError(_OF_POLICY)
        return self
