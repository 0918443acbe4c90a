"""Messages about a pool: start parameters of its workers, required numerical precision, and the workers' reports."""

from typing import Literal

from pydantic import Field

from marlaas_api.messages.base import BusMessage
from marlaas_api.messages.policies import Probe
from marlaas_api.messages.pool_spec import PoolSpec


class PoolDocument(BusMessage):
    """Start parameters of a pool's rollout and trainer workers, read from a file (a ConfigMap, or the local runner's).

    agent_room_bytes: memory that each trainer has for its agents where all workers share a machine (the local runner's
    estimate); 0: the trainer measures it.
    """

    name: str
    model_path: str
    spec: PoolSpec
    agent_room_bytes: int = 0


class AdaptedLayer(BusMessage):
    """A linear layer of the self-test's adapter: its output and input width, and the standard deviation of B's entries."""

    rows: int
    columns: int
    size: float


class SelfTestSpec(BusMessage):
    """A random adapter on every adaptable layer, with which an engine proves that it applies its slots.

    `marlaas_worker.calibration.draw_adapter` makes the adapter from the other fields. sha256: its
    `adapters.tensor_digest` in the calibration's dtype. logprobs: the trainer's, in float32, of the calibration's
    probes under the adapter (float32 bytes [T-1] each). tolerance: like the calibration's, under this adapter.
    """

    seed: int
    rank: int
    layers: dict[str, AdaptedLayer]
    sha256: str
    logprobs: tuple[bytes, ...]
    tolerance: float


class Calibration(BusMessage):
    """Largest allowed difference between logprobs of an engine and the trainer, for one base model and dtype.

    KV `calibrations`; a trainer of the pool writes it. base: `marlaas_worker.calibration.fingerprint` of the model.
    noise: mean |difference| of the trainer's logprobs in `dtype` and in float32 on the probes. tolerance: derived from
    `noise`. probes: ids, and the trainer's logprobs in float32 under the base model without adapter.
    """

    pool: str
    base: str
    dtype: str
    noise: float
    tolerance: float
    probes: tuple[Probe, ...]
    self_test: SelfTestSpec
    trainer: str = ""
    at: float = 0.0


class JobWait(BusMessage):
    """What a job waits for on a replica: a blob store that fails, or a document that cannot be read.

    reason: of `marlaas_api.reasons`. message: the fault and what to do. since: unix seconds.
    """

    reason: str
    message: str
    since: float


class ReplicaReport(BusMessage):
    """State of a running worker; KV `replicas` (expiring). Token counts and seconds are totals since the worker's start."""

    role: Literal["rollout", "trainer", "orchestrator"]
    pool: str
    replica: str
    slots: int = 0
    max_rank: int = 0
    max_model_len: int = 0
    """Longest conversation of the engine, in tokens; 0 if unknown."""
    agents_per_slot: int = 1
    """Agents that the pool admits for each adapter slot (rollout)."""
    kv_tokens: int = 0
    """Tokens that the engine's KV cache holds; 0 if unknown."""
    agent_room_bytes: int = 0
    """Memory that a trainer has for the adapters, gradients, optimizer moments and KL references of all its agents, those that it
    trains now included; 0 if unknown.
    """
    bytes_per_rank: int = 0
    """Of that memory, need of one agent without a KL reference for each unit of its adapter's rank, if the adapter has every
    layer.
    """
    ready: bool = True
    reason: str = ""
    """Why the replica is not ready, for people; empty if it is ready."""
    notices: dict[str, str] = Field(default_factory=dict)
    """Sentences about the base model's chat template and the engine's rounding, by reason."""
    probe_tolerance: float = 0.0
    """Tolerance of the calibration against which a rollout replica ran its last self-test; 0 before the first."""
    probe_distance: float = 0.0
    """Mean |difference| of its engine's logprobs from the trainer's in float32, at its last self-test."""
    verified: tuple[str, ...] = ()
    """Engine names of the adapter versions that this replica may serve now."""
    bound: tuple[str, ...] = ()
    num_running: int = 0
    """Requests in the engine (rollout), or agents that are bound (trainer)."""
    num_waiting: int = 0
    """Requests that wait for a place in the engine, or for their version."""
    job_tokens: dict[str, int] = Field(default_factory=dict)
    """Generated tokens by job uid, with an estimate of those of cancelled generations."""
    tenant_tokens: dict[str, int] = Field(default_factory=dict)
    """Computed prompt and generated tokens by tenant, for the queues of the pool's other replicas."""
    job_engine_s: dict[str, float] = Field(default_factory=dict)
    """Seconds of engine time by job uid."""
    job_preempted_tokens: dict[str, int] = Field(default_factory=dict)
    """Of `job_tokens`, those of generations that were cancelled after a preemption of the job."""
    job_preempted_engine_s: dict[str, float] = Field(default_factory=dict)
    """Of `job_engine_s`, likewise."""
    agent_slot_s: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Seconds for which the agent's versions had adapter slots, by job uid and agent."""
    agent_tokens: dict[str, float] = Field(default_factory=dict)
    """Recent tokens of agents of jobs with several policies, by policy key."""
    agent_work: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """Recent seconds of computation on a trainer, and seconds for which the agent was bound to it, by policy key; both count half
    after ten minutes.
    """
    job_turn_bytes: dict[str, int] = Field(default_factory=dict)
    """Bytes that this replica added to the stream TURNS, by job uid."""
    busy_s: float = 0.0
    """Time with a non-empty batch (rollout) or in forward/backward (trainer)."""
    wall_s: float = 0.0
    restarts: int = 0
    rss_bytes: int = 0
    broken: dict[str, str] = Field(default_factory=dict)
    """By `JobAgent.fault_key`, the error for which this trainer gave up the agent."""
    waits: dict[str, JobWait] = Field(default_factory=dict)
    """By job uid, what the replica's work for the job waits for."""
    refused: tuple[str, ...] = ()
    """Policy keys of agents that this trainer does not train at present."""
    at: float = 0.0
