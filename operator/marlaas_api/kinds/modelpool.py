"""ModelPool: the shared engines and trainers of one base model (docs/architecture.md)."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints, field_validator, model_validator

from marlaas_api.kinds.base import Distinct, DnsLabel, Kind, ObjectName, PathText, Quantity, Spec, matching, rules
from marlaas_api.kinds.placement import Affinity, Image, LabelMap, PullSecrets, SecretKeyRef, Tolerations
from marlaas_api.kinds.status import ModelPoolStatus

_ONE_SOURCE = "give exactly one of builtin, path, pvc and hub"


def _unchanged(name: str, *inner: str) -> str:
    """Return the rule that an optional field stays absent or unchanged.

    `self.?name == oldSelf.?name` is not used, because the API server cannot bound its cost.
    """
    same = " && ".join(f"self.{path} == oldSelf.{path}" for path in (inner or (name,)))
    return f"(has(self.{name}) ? has(oldSelf.{name}) && {same} : !has(oldSelf.{name}))"


_SAME_MODEL = " && ".join(
    (_unchanged("builtin"), _unchanged("path"), _unchanged("pvc"), _unchanged("hub", "hub.id", "hub.revision"))
)
_HUB_ID = r"^[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?$"


def _no_truth(value: object) -> object:
    """Refuse booleans: in Python True equals 1, so that `rank: yes` would be a rank."""
    if isinstance(value, bool):
        raise ValueError(f"expected a whole number, found {str(value).lower()}")
    return value


Rank = Annotated[Literal[1, 8, 16, 32, 64, 128, 256, 320, 512], BeforeValidator(_no_truth)]


class HubModel(Spec):
    """A repository of the Hugging Face hub; the workers need the network to fetch it."""

    id: Annotated[str, matching(_HUB_ID, "a repository of the hub, for example Qwen/Qwen3-0.6B", 128)] = Field(
        description="Repository, for example Qwen/Qwen3-0.6B."
    )
    revision: Annotated[str, StringConstraints(min_length=1, max_length=128)] = Field(
        "main",
        description="Branch, tag or commit; main because it always exists, but only a commit always names the same weights.",
    )
    token_secret_ref: SecretKeyRef | None = Field(
        None,
        description="Secret with the hub's access token, for models that need one; may be given later. Absent: no token.",
    )


class ClaimModel(Spec):
    """A model on a PersistentVolumeClaim of the release's namespace."""

    claim_name: ObjectName = Field(description="Name of the PersistentVolumeClaim; it is mounted read-only.")
    path: PathText = Field(
        "/", description="Folder within the volume, in Hugging Face format; the volume's root by default."
    )


class ModelSpec(Spec):
    """Where the base model lies: exactly one of the four."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("[has(self.builtin), has(self.path), has(self.pvc), has(self.hub)].exists_one(given, given)", _ONE_SOURCE)
        )
    )
    builtin: DnsLabel | None = Field(
        None,
        description="Name of a model that MARLaaS prepares itself; see `marlaas models list`. Absent: another source.",
    )
    path: PathText | None = Field(
        None, description="Folder in Hugging Face format on the workers' machines. Absent: another source."
    )
    pvc: ClaimModel | None = Field(None, description="A volume of the cluster. Absent: another source.")
    hub: HubModel | None = Field(None, description="A model of the Hugging Face hub. Absent: another source.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("builtin", "path", "pvc", "hub") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"{_ONE_SOURCE}; found {' and '.join(given) or 'none'}")
        return self


class WorkersSpec(Spec):
    """Workers of one role: pods in a cluster, processes in `marlaas run`."""

    replicas: int = Field(1, ge=1, le=256, description="Workers of this role; one serves a small pool.")
    cpu: Quantity | None = Field(None, description="CPU request of one worker, in cores. Absent: no request.")
    memory: Quantity | None = Field(None, description="Memory limit of one worker, in bytes. Absent: no limit.")
    gpus: int = Field(
        0,
        ge=0,
        le=64,
        description="Accelerators (nvidia.com/gpu) of one worker; 0 computes on the CPU. `marlaas run` takes what the machine has.",
    )
    threads: int | None = Field(
        None, ge=1, le=1024, description="Compute threads of one worker. Absent: chosen from the machine's cores."
    )
    node_selector: LabelMap = Field(
        default_factory=dict, description="Labels of the nodes that may run the workers; empty allows every node."
    )
    tolerations: Tolerations = Field(
        (), description="Taints of nodes that the workers put up with; none besides Kubernetes' own by default."
    )
    affinity: Affinity = Field(
        default_factory=dict,
        description="Rules of where the workers run, as `affinity` in a PodSpec; none by default.",
    )
    priority_class_name: ObjectName | None = Field(
        None, description="PriorityClass of the workers. Absent: the cluster's default."
    )
    image: Image | None = Field(
        None, description="Container image of the workers. Absent: the installation's, which fits the operator."
    )
    image_pull_secrets: PullSecrets = Field(
        (),
        description="Secrets of the release's namespace with which the image is pulled, besides the installation's; none by default.",
    )


class RolloutWorkers(WorkersSpec):
    """The engines."""

    engine: Literal["vllm", "reference"] = Field(
        "vllm",
        description="vllm: the real engine. reference: plain transformers, one sequence at a time; slow; a reply depends on "
        "nothing but its request, on the same kind of CPU (docs/models.md, Reproducibility).",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Number format of the base model's weights, in the engines and in the trainers; adapters, their gradients and the optimizer are float32. "
        "auto: bfloat16 on a GPU, float32 on a CPU. float16 is not offered: its gradients underflow.",
    )
    max_model_len: int = Field(
        2048,
        ge=16,
        le=1_048_576,
        description="Longest conversation in tokens, prompts and replies together; the default fits short tasks "
        "in little KV cache.",
    )
    max_num_seqs: int = Field(
        128, ge=1, le=4096, description="Sequences that one engine decodes at once; more wait in its queue."
    )
    kv_cache_bytes: Quantity = Field(
        "512Mi",
        description="Memory of one engine's KV cache, in bytes. Always given, because an engine left to choose takes nearly all memory.",
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
    """The trainers."""

    activation_bytes: Quantity = Field(
        "2Gi",
        description="Memory that the activations of one micro-batch may take, in bytes. A micro-batch that needs more keeps only each layer's input and "
        "computes the layers again in its backward pass: the same result, slower by up to half. A 135M-parameter model takes 1.2 MiB a token, so the "
        "default keeps micro-batches of up to 1,800 tokens as they are.",
    )


class SandboxBounds(Spec):
    """Where sandboxes run and how large they may be. Tenants choose none of it."""

    runtime_class_name: ObjectName | None = Field(
        None, description="RuntimeClass of sandboxes, for example gvisor. Absent: the installation's, or the cluster's."
    )
    node_selector: LabelMap = Field(
        default_factory=dict, description="Labels of the nodes that may run sandboxes; empty allows every node."
    )
    tolerations: Tolerations = Field(
        (), description="Taints of nodes that sandboxes put up with; none besides Kubernetes' own by default."
    )
    max_memory: Quantity | None = Field(
        None, description="Largest environment.memory that a job of this pool may have, in bytes. Absent: no bound."
    )


class ModelPoolSpec(Spec):
    """A base model, and the shared workers that serve and train its adapters."""

    model: ModelSpec = Field(
        description="The base model, frozen and shared by every adapter.",
        json_schema_extra=rules(
            (_SAME_MODEL, "cannot change: adapters belong to their base model; create another ModelPool")
        ),
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="Accelerators over which one engine splits the model; 1 keeps it whole, and this version's engines start with nothing else.",
    )
    adapter_slots: int = Field(
        8,
        ge=1,
        le=256,
        description="Adapter versions that one engine holds at once. A running agent needs maxStaleness + 2, so the default "
        "serves two jobs of maxStaleness 1.",
    )
    max_rank: Rank = Field(
        16, description="Largest adapter rank; every slot reserves engine memory for it, so no more than is needed."
    )
    rollout: RolloutWorkers = Field(default_factory=lambda: RolloutWorkers(), description="The engines.")
    trainer: TrainerWorkers = Field(default_factory=lambda: TrainerWorkers(), description="The trainers.")
    sandbox: SandboxBounds = Field(
        default_factory=lambda: SandboxBounds(), description="The sandboxes of the pool's jobs."
    )
    namespaces: Distinct[DnsLabel] = Field(
        (), max_length=1024, description="Namespaces that may use the pool; empty allows all."
    )


class ModelPool(Kind):
    """The shared engines and trainers of one base model."""

    kind: Literal["ModelPool"]
    spec: ModelPoolSpec
    status: ModelPoolStatus | None = Field(None, description="Written by the operator.")
