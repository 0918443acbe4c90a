"""The spec of a pool in its document; `marlaas_api.kinds` documents the meaning of the fields."""

from typing import Literal, Self

from pydantic import model_validator

from marlaas_api.messages.base import SpecPart
from marlaas_api.messages.job_spec import PoolChatTemplateSettings, QuantityText


class HubSource(SpecPart):
    """A repository of the Hugging Face hub."""

    id: str
    revision: str = "main"


class ClaimSource(SpecPart):
    """A folder of a PersistentVolumeClaim."""

    claim_name: str
    path: str = "/"


class ModelSource(SpecPart):
    """Where the base model lies: one of the four."""

    builtin: str | None = None
    path: str | None = None
    pvc: ClaimSource | None = None
    hub: HubSource | None = None

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        if self.builtin is None and self.path is None and self.pvc is None and self.hub is None:
            raise ValueError(
                "found none of builtin, path, pvc and hub; a newer release may have other sources: upgrade"
            )
        return self


class EngineSettings(SpecPart):
    """The engines. replicas: only `marlaas run` reads it. kv_cache_bytes: None means the free memory of the GPU, or 512Mi on a CPU."""

    replicas: int = 1
    gpus: int = 0
    threads: int | None = None
    engine: Literal["vllm", "reference"] = "vllm"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: int = 2048
    max_num_seqs: int = 128
    agents_per_slot: int = 1
    kv_cache_bytes: QuantityText | None = "512Mi"


class TrainerSettings(SpecPart):
    """The trainers. replicas: only `marlaas run` reads it. activation_bytes: None means a part of the GPU's free memory, or 2Gi on a CPU."""

    replicas: int = 1
    gpus: int = 0
    threads: int | None = None
    activation_bytes: QuantityText | None = "2Gi"


class PoolSpec(SpecPart):
    """The part of a ModelPool's spec that its workers and `marlaas run` need."""

    model: ModelSource
    chat_template: PoolChatTemplateSettings = PoolChatTemplateSettings()
    tensor_parallel_size: int = 1
    adapter_slots: int = 8
    max_rank: int = 16
    rollout: EngineSettings = EngineSettings()
    trainer: TrainerSettings = TrainerSettings()
