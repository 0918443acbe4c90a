"""ModelPool: the shared engines and trainers of one base model (DESIGN, "Kinds")."""

from typing import Literal, Self

from pydantic import Field, model_validator

from marlaas_api.kinds.base import DnsLabel, Kind, Quantity, Spec


class HubModel(Spec):
    """A model of the Hugging Face hub."""

    id: str
    revision: str = Field("main", description="Branch, tag or commit; a commit makes it reproducible.")


class ClaimModel(Spec):
    """A model on a PersistentVolumeClaim of the release's namespace."""

    claim_name: DnsLabel
    path: str = Field("/", description="Folder within the volume.")


class ModelSpec(Spec):
    """Where the base model lies: exactly one of the four."""

    builtin: str | None = Field(None, description="A model that MARLaaS prepares itself; see `marlaas models list`.")
    path: str | None = Field(None, description="Folder in Hugging Face format on the workers' machines.")
    pvc: ClaimModel | None = None
    hub: HubModel | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(value is not None for value in (self.builtin, self.path, self.pvc, self.hub)) != 1:
            raise ValueError("give exactly one of builtin, path, pvc and hub")
        return self


class WorkersSpec(Spec):
    """Pods of one role."""

    replicas: int = Field(1, ge=1, le=256)
    cpu: Quantity | None = Field(None, description="CPU request; none when absent.")
    memory: Quantity | None = Field(None, description="Memory limit; none when absent.")
    gpus: int = Field(0, ge=0, description="nvidia.com/gpu of one replica.")
    threads: int | None = Field(
        None, ge=1, description="Compute threads of one replica; chosen from the machine when absent."
    )
    node_selector: dict[str, str] = Field(default_factory=dict)


class RolloutWorkers(WorkersSpec):
    """The engines."""

    engine: Literal["vllm", "reference"] = Field(
        "vllm",
        description="reference: plain transformers, one sequence at a time; slow, deterministic, for exactness tests.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto chooses by the hardware."
    )
    max_model_len: int = Field(2048, ge=16, description="Longest conversation in tokens.")
    max_num_seqs: int = Field(128, ge=1, description="Sequences that one engine decodes at once.")
    kv_cache_bytes: Quantity = Field("512Mi", description="Memory of the KV cache of one engine.")


class ModelPoolSpec(Spec):
    """What the platform team offers."""

    model: ModelSpec
    tensor_parallel_size: int = Field(1, ge=1)
    adapter_slots: int = Field(
        8,
        ge=1,
        le=256,
        description="Adapter versions that one engine holds at once; a running agent needs maxStaleness + 2.",
    )
    max_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = Field(
        16, description="Largest adapter rank; engine memory is reserved for it."
    )
    rollout: RolloutWorkers = Field(default_factory=lambda: RolloutWorkers())
    trainer: WorkersSpec = Field(default_factory=lambda: WorkersSpec())
    namespaces: tuple[DnsLabel, ...] = Field((), description="Namespaces that may use the pool; empty allows all.")


class ModelPool(Kind):
    """The shared engines and trainers of one base model."""

    kind: Literal["ModelPool"]
    spec: ModelPoolSpec
