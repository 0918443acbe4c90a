"""A pool: what its workers are started with, and what each of them reports."""

from typing import Literal

from pydantic import Field

from marlaas_api.kinds import ModelPoolSpec
from marlaas_api.messages.base import Message


class PoolDocument(Message):
    """What a pool's rollout and trainer workers are started with (a file: ConfigMap or the local runner's)."""

    name: str
    model_path: str
    spec: ModelPoolSpec


class ReplicaReport(Message):
    """KV `replicas` (expiring): a worker is alive, what it can hold, and what it has proved. Tokens and seconds are totals since its start.

    max_model_len: longest conversation of the engine, in tokens; 0 if the replica does not say. verified: engine names of the adapter versions that
    this replica may serve now. job_tokens, job_engine_s: generated tokens and seconds of engine time by job uid; job_turn_bytes: bytes that this
    replica added to the stream of turns. busy_s: time with a non-empty batch (rollout) or in forward/backward (trainer). broken: by job
    uid, the words in which this worker has given the job up.
    """

    role: Literal["rollout", "trainer", "orchestrator"]
    pool: str
    replica: str
    slots: int = 0
    max_rank: int = 0
    max_model_len: int = 0
    ready: bool = True
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
