"""What is true of an agent, and what a version of it consists of; trainers write both."""

from pydantic import Field

from marlaas_api.blobs import BlobRef
from marlaas_api.messages.base import BusMessage, JobMessage
from marlaas_api.names import AdapterRef


class PolicyRecord(BusMessage):
    """KV `policy`: what is true of an agent. Version and epoch only grow; changed by compare-and-set alone.

    epoch: bumped by every bind; a trainer whose epoch is past cannot commit. step: the step whose commit made this version (-1: version 0).
    manifest: None until version 0 is published. train_s: seconds of the trainer's computing since the version before; not in the manifest, which a
    retried commit must find again byte for byte.
    """

    uid: str
    version: int = -1
    manifest: BlobRef | None = None
    epoch: int = 0
    holder: str = ""
    step: int = -1
    train_s: float = 0.0


class Probe(BusMessage):
    """Token ids (int32 bytes [T]) and the trainer's logprobs (float32 bytes [T-1]) of ids 1.. at temperature 1, computed in float32."""

    ids: bytes
    logprobs: bytes


class Manifest(JobMessage):
    """What a version is; a blob named by its own sha256, pointed to by the policy key.

    parent: the manifest of the version before; files: `adapter_model.safetensors` and `adapter_config.json`, loadable by PEFT. state: the trainer's (optimizer, RNG, counters).
    tensor_digests: per engine dtype, `marlaas_worker.adapters.tensor_digest` of what an engine slot must hold. consumed: groups trained in this step.
    probe_tolerance: mean |difference of logprobs| on the probes up to which an engine agrees with the trainer: the pool's
    (`Calibration`), or more if rounding costs more under this adapter; the default is that of manifests of earlier releases, in float32.
    metrics: scalars of the step (loss, grad_norm, kl, logprob_gap, tokens, ...).
    """

    agent: str
    version: int
    step: int
    parent: BlobRef | None
    rank: int
    files: dict[str, BlobRef]
    state: BlobRef | None
    tensor_digests: dict[str, str]
    probes: tuple[Probe, ...]
    probe_tolerance: float = 1e-3
    consumed: tuple[str, ...] = ()
    metrics: dict[str, float] = Field(default_factory=dict)
    trainer: str = ""
    at: float = 0.0

    @property
    def adapter(self) -> AdapterRef:
        """Identity of the version."""
        return AdapterRef(self.namespace, self.job, self.uid, self.agent, self.version)
