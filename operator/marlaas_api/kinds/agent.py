"""The agents of a job: each is one policy with an adapter of its own."""

from typing import Annotated

from pydantic import Field

from marlaas_api.kinds.base import Distinct, DnsLabel, PathText, Spec, matching
from marlaas_api.kinds.modelpool import Rank

LayerName = Annotated[
    str, matching(r"^[A-Za-z_][A-Za-z0-9_]*$", "the last part of a linear layer's name, for example q_proj", 64)
]


class PoolRef(Spec):
    """A ModelPool, by its name."""

    name: DnsLabel = Field(description="Name of the ModelPool.")


class AdapterSpec(Spec):
    """The LoRA adapter that is trained. Scaling is alpha / rank; a power of two is exact in every dtype."""

    rank: Rank = Field(
        8, description="Rank of the LoRA matrices; at most the pool's maxRank. 8 is enough for most RL tasks."
    )
    alpha: int = Field(
        16, ge=1, le=4096, description="LoRA alpha; the adapter is scaled by alpha / rank, twice by default."
    )
    targets: Distinct[LayerName] = Field(
        (),
        max_length=64,
        description="Names of the linear layers to adapt, each the last part of its module's name, for example q_proj; "
        "empty adapts all of them.",
    )


class InitFrom(Spec):
    """A PEFT folder that the pool's workers can read; it becomes version 0."""

    path: PathText = Field(description="Folder with adapter_config.json and adapter_model.safetensors.")


class AgentSpec(Spec):
    """One policy of the job, with its own adapter."""

    name: DnsLabel = Field(description="Name of the agent; environments ask for it by this name.")
    adapter: AdapterSpec = Field(default_factory=AdapterSpec, description="The LoRA adapter that is trained.")
    trainable: bool = Field(
        True, description="False freezes the agent at version 0; this version takes no frozen agent."
    )
    pool_ref: PoolRef | None = Field(
        None, description="Pool of this agent; this version takes none but the job's own. Absent: the job's own."
    )
    init_from: InitFrom | None = Field(
        None, description="Adapter to begin from. Absent: a zero adapter, the base model itself."
    )
