"""RLJob: a tenant's whole RL run as one object (DESIGN, "Kinds")."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from marlaas_api.kinds.base import DnsLabel, Kind, Quantity, Spec


class PoolRef(Spec):
    """Names a ModelPool."""

    name: DnsLabel


class AdapterSpec(Spec):
    """The LoRA adapter that is trained. Scaling is alpha / rank; a power of two is exact in every dtype."""

    rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = Field(
        8, description="Rank of the LoRA matrices; at most the pool's maxRank."
    )
    alpha: int = Field(16, ge=1, description="LoRA alpha; the adapter is scaled by alpha / rank.")
    targets: tuple[str, ...] = Field(
        (), description="Names of the linear layers to adapt, for example q_proj; empty adapts all of them."
    )


class InitFrom(Spec):
    """Where version 0 comes from, if not from zero: a PEFT folder that the pool's workers can read."""

    path: str = Field(description="Folder with adapter_config.json and adapter_model.safetensors.")


class AgentSpec(Spec):
    """One policy of the job, with its own adapter."""

    name: DnsLabel = Field(description="Name of the agent; environments ask for it by this name.")
    adapter: AdapterSpec = Field(default_factory=AdapterSpec)
    trainable: bool = Field(True, description="False freezes the agent at version 0.")
    pool_ref: PoolRef | None = Field(None, description="Pool of this agent; the job's own when absent.")
    init_from: InitFrom | None = Field(None, description="Adapter to begin from; a zero adapter when absent.")


class Egress(Spec):
    """One destination that the environment may reach; everything else is denied."""

    cidr: str = Field(description="Address range, for example 10.1.0.0/16.")
    ports: tuple[int, ...] = Field((), description="TCP ports; empty allows all.")


class SecretRef(Spec):
    """A Secret of the job's own namespace whose keys the environment sees as environment variables."""

    name: DnsLabel


class EnvironmentSpec(Spec):
    """The code that plays episodes: a builtin or `module:attribute` by name, or an image with an entrypoint."""

    name: str | None = Field(None, description="Builtin environment, or module:attribute of your own.")
    image: str | None = Field(None, description="Container image with the environment; needs entrypoint.")
    entrypoint: tuple[str, ...] = Field((), description="Command in the image that serves the environment.")
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the environment.")
    replicas: int = Field(1, ge=1, le=1000, description="Number of sandboxes.")
    concurrency: int = Field(64, ge=1, le=4096, description="Episodes that one sandbox plays at once.")
    episode_timeout_seconds: float = Field(
        300, gt=0, description="Longest time for one episode; then it is a fault of the environment."
    )
    turn_timeout_seconds: float = Field(
        120, gt=0, description="Longest wait for one turn; then it is a fault of the infrastructure."
    )
    memory: Quantity = Field("512Mi", description="Memory of one child process that runs environment code.")
    max_attempts: int = Field(3, ge=1, le=10, description="Plays of one episode before its fault stands.")
    max_fault_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of episodes lost to faults above which the job fails with the fault's own words.",
    )
    egress: tuple[Egress, ...] = Field((), description="Network destinations that the environment may reach.")
    secret_refs: tuple[SecretRef, ...] = Field((), description="Secrets that the environment sees.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.name is None) == (self.image is None):
            raise ValueError("give exactly one of name and image")
        if self.image is not None and not self.entrypoint:
            raise ValueError("image needs entrypoint, the command that serves the environment")
        return self


class RolloutSpec(Spec):
    """Sampling. Only what the trainer can reproduce is allowed: there is a temperature, and no top-p, top-k or penalties."""

    group_size: int = Field(8, ge=2, le=1024, description="Episodes per task (G); rewards are compared within them.")
    max_turns: int = Field(8, ge=1, description="Turns that an agent may take in one episode.")
    max_tokens: int = Field(256, ge=1, description="Tokens that one turn may generate.")
    temperature: float = Field(1.0, gt=0, le=2, description="Sampling temperature, in training and evaluation.")


class OptimizerSpec(Spec):
    """AdamW."""

    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's decay rates.")
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients of a larger norm are scaled down to it.")


class ClipSpec(Spec):
    """Bounds of the importance ratio: [1 - low, 1 + high] (PPO; asymmetric as in DAPO)."""

    low: float = Field(0.2, gt=0, lt=1)
    high: float = Field(0.28, gt=0)


class KlSpec(Spec):
    """A penalty that keeps the policy near version 0."""

    coefficient: float = Field(0.0, ge=0, description="Weight of the KL term; 0 leaves it out.")


class CorrectionSpec(Spec):
    """What is done about trainer and sampler not being the same function: truncated importance sampling."""

    type: Literal["truncated", "none"] = Field(
        "truncated", description="truncated: weigh a token by min(trainer/behaviour, cap)."
    )
    cap: float = Field(2.0, ge=1, description="Largest weight.")


class TrainingSpec(Spec):
    """The learning side."""

    algorithm: Literal["grpo", "reinforce"] = Field(
        "grpo", description="grpo: advantage in units of the group's deviation; reinforce: leave-one-out baseline."
    )
    steps: int = Field(ge=1, description="Steps to train; may be raised later.")
    groups_per_step: int = Field(8, ge=1, le=4096, description="Groups in one optimizer step (P).")
    microbatch_tokens: int = Field(4096, ge=16, description="Padded tokens of one forward and backward pass.")
    optimizer: OptimizerSpec = Field(default_factory=lambda: OptimizerSpec())
    max_staleness: int = Field(
        1,
        ge=0,
        le=16,
        description="Versions that a trained group may be behind; 0 is strict: on-policy and exactly reproducible.",
    )
    max_refill: int = Field(
        2,
        ge=0,
        le=16,
        description="How many times groupsPerStep may be drawn anew in a step to replace groups without signal.",
    )
    clip: ClipSpec = Field(default_factory=lambda: ClipSpec())
    kl: KlSpec = Field(default_factory=lambda: KlSpec())
    correction: CorrectionSpec = Field(default_factory=lambda: CorrectionSpec())
    seed: int = Field(0, ge=0, description="Seed of tasks, sampling and initial weights.")


class EvaluationSpec(Spec):
    """Held-out tasks, played with the training temperature."""

    every: int = Field(
        10, ge=1, description="Steps between evaluations; version 0 and the last version are always evaluated."
    )
    tasks: int = Field(64, ge=0, description="Held-out tasks; 0 evaluates never.")
    promote: Literal["last", "best"] = Field("last", description="Which version the job publishes at its end.")


class CheckpointSpec(Spec):
    """How much of the past is kept."""

    keep: int = Field(2, ge=1, description="Versions whose files are kept besides the promoted one.")


class ExportSpec(Spec):
    """Where the promoted adapter goes besides the blob store."""

    path: str | None = Field(None, description="Folder for a plain PEFT adapter.")


class RLJobSpec(Spec):
    """What the tenant wants."""

    pool_ref: PoolRef
    agents: tuple[AgentSpec, ...] = Field((AgentSpec(name="policy"),), min_length=1)
    environment: EnvironmentSpec
    rollout: RolloutSpec = Field(default_factory=lambda: RolloutSpec())
    training: TrainingSpec
    evaluation: EvaluationSpec = Field(default_factory=lambda: EvaluationSpec())
    checkpoint: CheckpointSpec = Field(default_factory=lambda: CheckpointSpec())
    export: ExportSpec = Field(default_factory=lambda: ExportSpec())
    adapter_retention: Literal["keep", "delete"] = Field(
        "keep", description="What becomes of the published adapter when the job is deleted."
    )
    priority: int = Field(0, ge=-1000, le=1000, description="Order within the tenant; higher goes first.")
    suspend: bool = Field(
        False, description="True stops the job at the next step and frees what it holds; false goes on."
    )
    active_deadline_seconds: float | None = Field(
        None, gt=0, description="Longest time from admission to end; none when absent."
    )
    ttl_seconds_after_finished: float | None = Field(
        None, ge=0, description="Delete the object this long after its end; never when absent."
    )

    @model_validator(mode="after")
    def _agents_differ(self) -> Self:
        names = [agent.name for agent in self.agents]
        if len(set(names)) != len(names):
            raise ValueError("agents must have different names")
        return self


class RLJob(Kind):
    """A tenant's whole RL run."""

    kind: Literal["RLJob"]
    spec: RLJobSpec
