"""The agents of a job: each is one policy with an adapter of its own."""

from typing import Annotated

from pydantic import Field

from marlaas_api.kinds.base import Distinct, DnsLabel, PathText, Spec, matching
from marlaas_api.kinds.modelpool import Rank

LayerName = Annotated[
    str, matching(r"^[A-Za-z_][A-Za-z0-9_]*$", "the last component of a linear layer's name, for example q_proj", 64)
]


class PoolRef(Spec):
    """Reference to a ModelPool by name."""

    name: DnsLabel = Field(description="Name of the ModelPool.")


class AdapterSpec(Spec):
    """The LoRA adapter that is trained. Its scale is alpha / rank; choose a power of two, which is exact in every dtype."""

    rank: Rank = Field(
        8, description="Rank of the LoRA matrices; at most the pool's maxRank. 8 is enough for most RL tasks."
    )
    alpha: int = Field(
        16,
        ge=1,
        le=4096,
        description="LoRA alpha. The adapter's output is scaled by alpha / rank; the defaults give 2.",
    )
    targets: Distinct[LayerName] = Field(
        (),
        max_length=64,
        description="Linear layers to adapt, each by the last component of its module name, for example q_proj; empty adapts all linear layers.",
    )


class InitFrom(Spec):
    """An adapter in PEFT format that becomes version 0."""

    path: PathText = Field(
        description="Folder with adapter_config.json and adapter_model.safetensors; the pool's workers must be able to read it."
    )


class AgentSpec(Spec):
    """One policy of the job, with its own adapter."""

    name: DnsLabel = Field(description="Name of the agent, by which environments request its turns.")
    adapter: AdapterSpec = Field(default_factory=AdapterSpec, description="The LoRA adapter that is trained.")
    trainable: bool = Field(
        True,
        description="False freezes the agent at version 0: the base model, or the adapter of initFrom. At least one agent of a job is trainable.",
    )
    pool_ref: PoolRef | None = Field(
        None, description="Pool that serves and trains this agent. Absent: the job's pool."
    )
    init_from: InitFrom | None = Field(
        None, description="Initial adapter. Absent: a zero adapter; the policy then equals the base model."
    )
