"""ModelPool: the shared engines and trainers of one base model (docs/explanation/architecture.md)."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints, field_validator, model_validator

from marlaas_api.kinds.base import (
    Distinct,
    DnsLabel,
    Kind,
    ObjectName,
    PathText,
    Quantity,
    Spec,
    matching,
    rules,
    unchanged,
)
from marlaas_api.kinds.chat_template import PoolChatTemplateSpec
from marlaas_api.kinds.placement import Affinity, Image, LabelMap, PullSecrets, SecretKeyRef, Tolerations
from marlaas_api.kinds.status import ModelPoolStatus

_ONE_SOURCE = "give exactly one of builtin, path, pvc and hub"


_SAME_MODEL = " && ".join(
    (unchanged("builtin"), unchanged("path"), unchanged("pvc"), unchanged("hub", "hub.id", "hub.revision"))
)
_HUB_ID = r"^[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?$"


def _no_truth(value: object) -> object:
    """Refuse booleans: in Python True equals 1, so that `rank: yes` would be a rank."""
    if isinstance(value, bool):
        raise ValueError(f"expected a whole number, found {str(value).lower()}")
    return value


MaxRank = Annotated[Literal[1, 8, 16, 32, 64, 128, 256, 320, 512], BeforeValidator(_no_truth)]
"""Ranks that vLLM can reserve for a slot; an adapter of any lower rank fits."""


class HubModel(Spec):
    """A repository of the Hugging Face hub. The workers download it, so they need network access."""

    id: Annotated[str, matching(_HUB_ID, "a repository of the hub, for example Qwen/Qwen3-0.6B", 128)] = Field(
        description="Repository, for example Qwen/Qwen3-0.6B."
    )
    revision: Annotated[str, StringConstraints(min_length=1, max_length=128)] = Field(
        "main",
        description="Branch, tag or commit. Only a commit always refers to the same weights; main is the default because it always exists.",
    )
    token_secret_ref: SecretKeyRef | None = Field(
        None,
        description="Secret with the hub's access token, for models that need one; may be set later. Absent: no token.",
    )


class ClaimModel(Spec):
    """A model on a PersistentVolumeClaim of the release's namespace."""

    claim_name: ObjectName = Field(description="Name of the PersistentVolumeClaim; it is mounted read-only.")
    path: PathText = Field(
        "/", description="Folder of the model within the volume, in Hugging Face format; the volume's root by default."
    )


class ModelSpec(Spec):
    """Source of the base model; exactly one of the four fields must be set."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("[has(self.builtin), has(self.path), has(self.pvc), has(self.hub)].exists_one(given, given)", _ONE_SOURCE)
        )
    )
    builtin: DnsLabel | None = Field(
        None,
        description="Name of a builtin model, which MARLaaS prepares itself; see `marlaas models list`. Absent: another source.",
    )
    path: PathText | None = Field(
        None,
        description="Folder of the model in Hugging Face format, on the workers' machines. Absent: another source.",
    )
    pvc: ClaimModel | None = Field(None, description="Model on a volume. Absent: another source.")
    hub: HubModel | None = Field(None, description="Model of the Hugging Face hub. Absent: another source.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("builtin", "path", "pvc", "hub") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"{_ONE_SOURCE}; found {' and '.join(given) or 'none'}")
        return self


class WorkersSpec(Spec):
    """Workers of one role: pods in a cluster, processes in `marlaas run`."""

    replicas: int = Field(
        1, ge=1, le=256, description="Number of workers of this role; one is enough for a small pool."
    )
    cpu: Quantity | None = Field(None, description="CPU request of one worker, in cores. Absent: no request.")
    memory: Quantity | None = Field(None, description="Memory limit of one worker, in bytes. Absent: no limit.")
    gpus: int = Field(
        0,
        ge=0,
        le=64,
        description="Number of accelerators (nvidia.com/gpu) of one worker; 0 computes on the CPU. `marlaas run` uses the machine's "
        "accelerators whatever it says. If it is not 0 and there is an accelerator that cannot be used, the worker ends with an error.",
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Number of compute threads of one worker. Absent: derived from the machine's cores.",
    )
    node_selector: LabelMap = Field(
        default_factory=dict, description="Labels of the nodes that may run the workers; empty allows every node."
    )
    tolerations: Tolerations = Field(
        (), description="Node taints that the workers tolerate, besides Kubernetes' defaults; none by default."
    )
    affinity: Affinity = Field(
        default_factory=dict,
        description="Affinity of the worker pods, in the format of `affinity` in a PodSpec; none by default.",
    )
    priority_class_name: ObjectName | None = Field(
        None, description="PriorityClass of the workers. Absent: the cluster's default."
    )
    image: Image | None = Field(
        None,
        description="Container image of the workers. Absent: the installation's, which matches the operator's version.",
    )
    image_pull_secrets: PullSecrets = Field(
        (),
        description="Registry credentials for image, besides the installation's: Secrets in the release's namespace; none by default.",
    )


class RolloutWorkers(WorkersSpec):
    """The engines: workers that generate turns."""

    engine: Literal["vllm", "reference"] = Field(
        "vllm",
        description="Inference engine. vllm: for normal use. reference: plain transformers, one sequence at a time; slow but reproducible: on the same kind "
        "of CPU a reply depends only on its request (docs/reference/models.md, Reproducibility).",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Number format of the base model's weights, in engines and trainers; the trainer's adapters, gradients and optimizer state are float32. "
        "auto: bfloat16 on a GPU, float32 on a CPU. float16 is not supported, because its gradients underflow.",
    )
    max_model_len: int = Field(
        2048,
        ge=16,
        le=1_048_576,
        description="Maximum length of a conversation in tokens, prompts and replies together. The default suits short tasks and needs little KV cache.",
    )
    max_num_seqs: int = Field(
        128,
        ge=1,
        le=4096,
        description="Maximum number of sequences that one engine decodes at once; more wait in its queue.",
    )
    agents_per_slot: int = Field(
        2,
        ge=1,
        le=64,
        description="Number of agents that the pool admits for each adapter slot of its engines. Agents take turns on the slots; an adapter that left its slot "
        "is loaded and proven again, in milliseconds. The pool admits at most adapterSlots x replicas x agentsPerSlot agents. 1 gives each agent a slot. "
        "Choose more than 2 only if agents wait long for tools or for the trainer; otherwise more agents and sandboxes share a full engine.",
    )
    kv_cache_bytes: Quantity | None = Field(
        None,
        description="Memory of one engine's KV cache, in bytes. Absent: on a GPU what the card has left, and if `marlaas run` shares a card between "
        "workers, an equal part of it; on a CPU 512Mi.",
    )

    @field_validator("dtype", mode="before")
    @classmethod
    def _no_float16(cls, dtype: object) -> object:
        if dtype == "float16":
            raise ValueError(
                "float16 is not supported: gradients of a float16 base model underflow; use bfloat16 or float32"
            )
        return dtype


class TrainerWorkers(WorkersSpec):
    """The trainers: workers that compute gradients and optimizer steps."""

    activation_bytes: Quantity | None = Field(
        None,
        description="Maximum memory for the activations of one micro-batch, in bytes. A micro-batch that needs more uses gradient checkpointing: as many "
        "layers as necessary store only their input and are recomputed in the backward pass. The result is the same; the time grows by up to half. Absent: on a GPU "
        "three quarters of what the card has left once the base model is loaded; on a CPU 2Gi, enough for 1,750 tokens of a 135M-parameter model.",
    )


class SandboxBounds(Spec):
    """Placement and maximum size of sandboxes. Set by the platform team; an RLJob has no such fields."""

    runtime_class_name: ObjectName | None = Field(
        None,
        description="RuntimeClass of sandboxes, for example gvisor. Absent: the installation's, or else the cluster's default.",
    )
    node_selector: LabelMap = Field(
        default_factory=dict, description="Labels of the nodes that may run sandboxes; empty allows every node."
    )
    tolerations: Tolerations = Field(
        (), description="Node taints that sandboxes tolerate, besides Kubernetes' defaults; none by default."
    )
    max_memory: Quantity | None = Field(
        None, description="Maximum environment.memory of a job of this pool, in bytes. Absent: no limit."
    )


class ModelPoolSpec(Spec):
    """A base model, and the shared workers that serve and train its adapters."""

    model: ModelSpec = Field(
        description="The base model, frozen and shared by every adapter.",
        json_schema_extra=rules(
            (_SAME_MODEL, "cannot change: adapters belong to their base model; create another ModelPool")
        ),
    )
    chat_template: PoolChatTemplateSpec = Field(
        default_factory=lambda: PoolChatTemplateSpec(),
        description="Chat template of jobs that choose none (their rollout.chatTemplate); by default the model's own.",
        json_schema_extra=rules(
            (
                "self == oldSelf",
                "cannot change: jobs have sampled with it; set rollout.chatTemplate of new jobs, or create another ModelPool",
            )
        ),
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="Number of accelerators over which one engine splits the model; this version supports only 1.",
    )
    adapter_slots: int = Field(
        8,
        ge=1,
        le=256,
        description="Number of adapter versions that one engine holds at once. Agents take turns on the slots (rollout.agentsPerSlot), but "
        "the versions of one agent, maxStaleness + 2, must fit together.",
    )
    max_rank: MaxRank = Field(
        16,
        description="Maximum adapter rank. Every slot reserves engine memory for this rank, so set it no higher than needed.",
    )
    rollout: RolloutWorkers = Field(default_factory=lambda: RolloutWorkers(), description="The engines.")
    trainer: TrainerWorkers = Field(default_factory=lambda: TrainerWorkers(), description="The trainers.")
    sandbox: SandboxBounds = Field(
        default_factory=lambda: SandboxBounds(),
        description="Placement and maximum size of sandboxes.",
    )
    namespaces: Distinct[DnsLabel] = Field(
        (), max_length=1024, description="Namespaces that may use the pool; empty allows all."
    )

    @property
    def places(self) -> int:
        """Number of agents that the pool admits at a time."""
        return self.adapter_slots * self.rollout.replicas * self.rollout.agents_per_slot


class ModelPool(Kind):
    """The shared engines and trainers of one base model."""

    kind: Literal["ModelPool"]
    spec: ModelPoolSpec
    status: ModelPoolStatus | None = Field(None, description="Observed state; written by the operator.")
