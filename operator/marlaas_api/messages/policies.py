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
    """Current state of an agent's policy; KV `policy`. Version and epoch only grow; it changes only by compare-and-set.

    epoch: incremented by every bind; a trainer with an older epoch cannot commit. step: the last step that the trainer
    has finished (-1: version 0). untrained: the latest of these steps that made no version, oldest first. manifest: None until version 0 is published.
    adapter_bytes: of the adapter files and manifests of all versions, which are kept as long as the job. state_bytes: of the
    training states that are kept (`checkpoint.keep`), oldest first. Blobs of failed commits are not counted.
    """

    uid: str
    version: int = -1
    manifest: BlobRef | None = None
    epoch: int = 0
    holder: str = ""
    step: int = -1
    adapter_bytes: int = 0
    state_bytes: tuple[int, ...] = ()
    untrained: tuple[UntrainedStep, ...] = ()

    @property
    def stored_bytes(self) -> int:
        """Bytes that the agent's versions keep in the blob store."""
        return self.adapter_bytes + sum(self.state_bytes)


class Probe(BusMessage):
    """Token ids (int32 bytes [T]) and the trainer's logprobs (float32 bytes [T-1]) of ids 1.. at temperature 1, computed in float32."""

    ids: bytes
    logprobs: bytes


class Manifest(JobMessage):
    """Content of a version; a blob named by its own sha256, referenced by the policy key.

    parent: manifest of the previous version. files: `adapter_model.safetensors` and `adapter_config.json`, loadable by
    PEFT. state: the trainer's state (optimizer, RNG, counters). tensor_digests: by engine dtype, the
    `marlaas_worker.adapters.tensor_digest` of the tensors that an engine slot must hold. consumed: groups trained in
    this step. metrics: scalars of the step (loss, grad_norm, kl, logprob_gap, tokens, ...). train_s: seconds
    that the trainer computed since the previous version; a retried commit repeats them.

    probe_tolerance: largest mean |difference of logprobs| on the probes at which an engine agrees with the trainer. It
    is the pool's (`Calibration`), or larger if rounding costs more under this adapter. The default is that of manifests
    of earlier releases, in float32.
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
    train_s: float = 0.0
    trainer: str = ""
    at: float = 0.0

    @property
    def adapter(self) -> AdapterRef:
        """Identity of the version."""
        return AdapterRef(self.namespace, self.job, self.uid, self.agent, self.version)
