"""The current state of an agent's policy, and the content of its versions; trainers write both."""

from pydantic import Field

from marlaas_api.blobs import BlobRef
from marlaas_api.messages.base import BusMessage, JobMessage
from marlaas_api.messages.steps import UntrainedCause
from marlaas_api.names import AdapterRef


class UntrainedStep(BusMessage):
    """A step with groups of which no token was trained. It makes no version. cause: of all its groups. metrics, train_s: as of a `Manifest`."""

    step: int
    cause: UntrainedCause
    metrics: dict[str, float] = Field(default_factory=dict)
    train_s: float = 0.0


class PolicyRecord(BusMessage):
    """Current state of an agent's policy; KV `policy`. Version and epoch only grow; it changes only by compare-and-set."""

    uid: str
    version: int = -1
    manifest: BlobRef | None = None
    """None until version 0 is published."""
    epoch: int = 0
    """Incremented by every bind; a trainer with an older epoch cannot commit."""
    holder: str = ""
    step: int = -1
    """Last step that the trainer has finished (-1: version 0)."""
    adapter_bytes: int = 0
    """Of the adapter files and manifests of all versions, which are kept as long as the job. Blobs of failed commits are not
    counted.
    """
    state_bytes: tuple[int, ...] = ()
    """Of the training states that are kept (`checkpoint.keep`), oldest first."""
    untrained: tuple[UntrainedStep, ...] = ()
    """The latest finished steps that made no version, oldest first."""

    @property
    def stored_bytes(self) -> int:
        """Bytes that the agent's versions keep in the blob store."""
        return self.adapter_bytes + sum(self.state_bytes)


class Probe(BusMessage):
    """Token ids (int32 bytes [T]) and the trainer's logprobs (float32 bytes [T-1]) of ids 1.. at temperature 1, computed in float32."""

    ids: bytes
    logprobs: bytes


class Manifest(JobMessage):
    """Content of a version; a blob named by its own sha256, referenced by the policy key."""

    agent: str
    version: int
    step: int
    parent: BlobRef | None
    """Manifest of the previous version."""
    rank: int
    files: dict[str, BlobRef]
    """`adapter_model.safetensors` and `adapter_config.json`, loadable by PEFT."""
    state: BlobRef | None
    """The trainer's state: AdamW's moments, counters, the weights of the KL reference and the token budget."""
    tensor_digests: dict[str, str]
    """By engine dtype, the `marlaas_worker.adapters.tensor_digest` of the tensors that an engine slot must hold."""
    probes: tuple[Probe, ...]
    probe_tolerance: float = 1e-3
    """Largest mean |difference of logprobs| on the probes at which an engine agrees with the trainer. It is the pool's (`Calibration`),
    or larger if rounding costs more under this adapter. The default is that of manifests of earlier releases, in float32.
    """
    consumed: tuple[str, ...] = ()
    """Groups trained in this step."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Scalars of the step (loss, grad_norm, kl, logprob_gap, tokens, ...)."""
    train_s: float = 0.0
    """Seconds that the trainer computed since the previous version; a retried commit repeats them."""
    trainer: str = ""
    at: float = 0.0

    @property
    def adapter(self) -> AdapterRef:
        """Identity of the version."""
        return AdapterRef(self.namespace, self.job, self.uid, self.agent, self.version)
