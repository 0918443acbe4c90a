"""A pool: what its workers are started with, how exactly its engines must compute, and what each worker reports."""

from typing import Literal

from pydantic import Field

from marlaas_api.kinds import ModelPoolSpec
from marlaas_api.messages.base import BusMessage
from marlaas_api.messages.policies import Probe


class PoolDocument(BusMessage):
    """What a pool's rollout and trainer workers are started with (a file: ConfigMap or the local runner's)."""

    name: str
    model_path: str
    spec: ModelPoolSpec


class AdaptedLayer(BusMessage):
    """A linear layer of the self-test's adapter: its output and input width, and the standard deviation of B's entries."""

    rows: int
    columns: int
    size: float


class SelfTestSpec(BusMessage):
    """A random adapter on every adaptable layer, by which an engine shows that it applies its slots.

    `marlaas_worker.calibration.draw_adapter` makes it from the rest of this. sha256: `adapters.tensor_digest` in the calibration's dtype.
    logprobs: the trainer's, in float32, of the calibration's probes under it (float32 bytes [T-1] each). tolerance: as the calibration's, under this adapter.
    """

    seed: int
    rank: int
    layers: dict[str, AdaptedLayer]
    sha256: str
    logprobs: tuple[bytes, ...]
    tolerance: float


class Calibration(BusMessage):
    """KV `calibrations`: how far an engine's logprobs may be from the trainer's, for one base model and dtype; a trainer of the pool writes it.

    base: `marlaas_worker.calibration.fingerprint` of the model. noise: mean |difference| of the trainer's logprobs in `dtype` and in float32 on the
    probes; tolerance: what follows from it. probes: ids, and the trainer's logprobs in float32 under the bare base model.
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


class ReplicaReport(BusMessage):
    """KV `replicas` (expiring): a worker is alive, what it can hold, and what it has proved. Tokens and seconds are totals since its start.

    max_model_len: longest conversation of the engine, in tokens; 0 if the replica does not say. verified: engine names of the adapter versions that
    this replica may serve now. job_tokens, job_engine_s: generated tokens and seconds of engine time by job uid; job_turn_bytes: bytes that this
    replica added to the stream of turns. busy_s: time with a non-empty batch (rollout) or in forward/backward (trainer). broken: by job
    uid, the words in which this worker has given the job up. reason: why it is not ready, for people; empty if it is. probe_tolerance: the
    calibration's, with which a rollout replica passed its self-test; 0 before.
    """

    role: Literal["rollout", "trainer", "orchestrator"]
    pool: str
    replica: str
    slots: int = 0
    max_rank: int = 0
    max_model_len: int = 0
    ready: bool = True
    reason: str = ""
    probe_tolerance: float = 0.0
    verified: tuple[str, ...] = ()
    bound: tuple[str, ...] = ()
    num_running: int = 0
    job_tokens: dict[str, int] = Field(default_factory=dict)
    job_engine_s: dict[str, float] = Field(default_factory=dict)
    job_turn_bytes: dict[str, int] = Field(default_factory=dict)
    busy_s: float = 0.0
    wall_s: float = 0.0
    restarts: int = 0
    rss_bytes: int = 0
    broken: dict[str, str] = Field(default_factory=dict)
    at: float = 0.0
