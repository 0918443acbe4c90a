"""Every message that a worker sends to another, as frozen pydantic models.

Who writes what (DESIGN, "The picture"): the orchestrator writes Task, GroupReady, StepClosed, StepRecord, EvalRecord, Progress
and pins of strict and evaluation groups; a sandbox writes GenerateRequest and Episode, and nothing that a bill or a gradient depends on
but rewards; rollout writes GenerateReply, Turn and the other pins; trainers write PolicyRecord and Manifest.
"""

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from marlaas_api.blobs import BlobRef
from marlaas_api.kinds import ModelPoolSpec, RLJobSpec
from marlaas_api.names import AdapterRef, JobRef, Split
from marlaas_api.names import StopReason as StopReason


class Message(BaseModel):
    """Base of everything on the bus; the class name is its tag on the wire (see `marlaas_api.wire`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class JobMessage(Message):
    """A message of one job. The uid tells a job from an earlier one of the same name: readers ignore other uids."""

    namespace: str
    job: str
    uid: str

    @property
    def ref(self) -> JobRef:
        """The job this belongs to."""
        return JobRef(self.namespace, self.job, self.uid)


class Verdict(Message):
    """Why a job cannot go on, found by who looks after its pods. reason: CamelCase, for machines; message: for people, with what to do."""

    reason: str
    message: str


class JobDocument(JobMessage):
    """What to run; KV `jobs`. The operator or `marlaas run` writes it, every worker re-reads it.

    `deleted` asks the orchestrator to stop the job and forget it: it removes this key last. `verdict` asks it to end the job as failed.
    """

    generation: int = 1
    pool: str
    tenant: str
    tenant_weight: float = 1.0
    seed: int = 0
    spec: RLJobSpec
    deleted: bool = False
    verdict: Verdict | None = None


class Task(JobMessage):
    """One prompt instance to play `group_size` times; TASKS. Its content is the environment's, from index and seed.

    A training task that comes again in a later pass through the data has the same index and seed, and a group of its own.
    """

    group: str
    split: Split
    index: int = Field(ge=0)
    seed: int
    group_size: int = Field(ge=1)


class ToolCall(Message):
    """A call that an assistant's message makes; arguments: the JSON text of an object."""

    name: str
    arguments: str
    id: str = ""


class ChatMessage(Message):
    """One chat message; `name` is a tool's. Only an assistant's message that was written, not generated, has `tool_calls`: what was
    generated is text."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


class GenerateRequest(JobMessage):
    """Append to a conversation and generate; core subject `gen.<ns>.<job>.<agent>`.

    The id is `names.request_id(episode, turn)`. `parent` None begins a conversation; otherwise it names the turn whose
    conversation goes on (turns may branch). `append` is chat messages, or raw text that bypasses the template. `max_tokens` None: the job's own bound,
    which it can only lower. `tools`: the JSON text of each function that the chat template is shown; None: as in the parent, a new conversation has none.
    `deadline_s` counts from receipt. `reply_to` is set when a replica forwards to the owner.
    """

    agent: str
    group: str
    member: int
    episode: str
    turn: int
    parent: int | None
    append: tuple[ChatMessage, ...] | str
    tools: tuple[str, ...] | None = None
    max_tokens: int | None = None
    deadline_s: float
    reply_to: str | None = None


class CancelRequest(JobMessage):
    """The sandbox no longer wants an episode's turns; same subject as the request."""

    agent: str
    episode: str


class ReplyPhase(StrEnum):
    """A request is accepted, beats while it waits or runs, and ends in a result or a failure."""

    ACCEPTED = "accepted"
    HEARTBEAT = "heartbeat"
    RESULT = "result"
    FAILED = "failed"


class GenerateReply(Message):
    """What a sandbox hears of its request, on the reply inbox. It never sees ids, logprobs or versions.

    `retryable` says whether the same request may be sent again; `error` is for people.
    """

    request: str
    phase: ReplyPhase
    replica: str
    text: str = ""
    stop_reason: StopReason | None = None
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    error: str = ""
    retryable: bool = False


class Meter(Message):
    """What a turn cost: tokens prefilled (of them `cached_tokens` from the prefix cache) and generated; seconds in queue and engine."""

    prompt_tokens: int
    cached_tokens: int = 0
    output_tokens: int
    queue_s: float = 0.0
    engine_s: float = 0.0


class Turn(JobMessage):
    """One generation as the engine's side saw it; `turn.<ns>.<job>.<episode>.<n>`, first writer wins.

    prompt_ids, output_ids: int32 bytes [T] (`marlaas_api.arrays`); logprobs: float32 bytes, one per output id, under the
    sampling policy at `temperature`. `prompt_ids` are only what this turn appended after its parent's output; with `opens_segment`
    they are a whole prompt (the first turn, or a template that rewrote its past). `text` is the reply's text; `append` and `tools` are what was
    asked for.
    """

    agent: str
    group: str
    member: int
    episode: str
    turn: int
    parent: int | None
    version: int
    adapter_sha256: str
    opens_segment: bool
    append: tuple[ChatMessage, ...] | str
    tools: tuple[str, ...] | None = None
    prompt_ids: bytes
    output_ids: bytes
    logprobs: bytes
    text: str
    stop_reason: StopReason
    temperature: float
    meter: Meter
    replica: str
    at: float


class Pin(Message):
    """KV `pins`: the one version that a group is sampled from; created once, never changed."""

    version: int


class IssueLedger(JobMessage):
    """KV `ledger`: which tasks the orchestrator has given out; written before they are published, by compare-and-set.

    open: indices of groups issued and not yet part of a recorded step. next_index: never issued so far. evaluating: version under
    evaluation. skipped_*: indices below next_index that were never issued because their tasks rested (in_pass: in the running pass alone).
    """

    next_index: int = 0
    skipped_in_pass: int = 0
    skipped_solved: int = 0
    skipped_hopeless: int = 0
    open: tuple[int, ...] = ()
    evaluating: int | None = None


class FaultClass(StrEnum):
    """Faults that the policy did not cause, and that are therefore never scored."""

    INFRA = "infra"
    ENV = "env"


class Ending(StrEnum):
    """How the policy's side of an episode ended; every one of these is scored."""

    COMPLETED = "completed"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    TOOL_ERROR = "tool_error"


class Episode(JobMessage):
    """A finished play; EPISODES. Either `fault` says why it does not count, or `rewards` (per agent) say what it was worth.

    leaves: per agent, the last turn of each of its conversations. prior_faults: what earlier attempts at this member died of.
    """

    group: str
    split: Split
    index: int
    member: int
    episode: str
    fault: FaultClass | None = None
    fault_text: str = ""
    prior_faults: tuple[FaultClass, ...] = ()
    ending: Ending = Ending.COMPLETED
    rewards: dict[str, float] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)
    leaves: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    num_turns: int = 0
    duration_s: float = 0.0
    tool_s: float = 0.0


class TrajectoryRef(Message):
    """One member of a group for one agent: where its turns are, and what they earned."""

    member: int
    episode: str
    leaves: tuple[int, ...]
    reward: float


class GroupReady(JobMessage):
    """A complete group, assigned to a step; GROUPS. The step trains it at `base_version`, so its staleness is already exact.

    position: dense, from 0 within the step; a trainer accumulates in this order and no other. trajectories: at least two.
    """

    agent: str
    step: int
    base_version: int
    position: int
    group: str
    index: int
    version: int
    trajectories: tuple[TrajectoryRef, ...]

    @property
    def staleness(self) -> int:
        """Trainer version minus pinned version at the moment of training."""
        return self.base_version - self.version


class StepClosed(JobMessage):
    """No more groups come for this step; GROUPS. The optimizer step is due once positions 0..num_groups-1 are in.

    indices: every task resolved in the step, those without signal included (the orchestrator's memory, not the trainer's business).
    """

    agent: str
    step: int
    base_version: int
    num_groups: int
    indices: tuple[int, ...] = ()


class PolicyRecord(Message):
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


class Probe(Message):
    """Token ids (int32 bytes [T]) and the trainer's logprobs (float32 bytes [T-1]) of ids 1.. at temperature 1."""

    ids: bytes
    logprobs: bytes


class Manifest(JobMessage):
    """What a version is; a blob named by its own sha256, pointed to by the policy key.

    parent: the manifest of the version before; files: `adapter_model.safetensors` and `adapter_config.json`, loadable by PEFT. state: the trainer's (optimizer, RNG, counters).
    tensor_digests: per engine dtype, `marlaas_worker.adapters.tensor_digest` of what an engine slot must hold. consumed: groups trained in this step.
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
    consumed: tuple[str, ...] = ()
    metrics: dict[str, float] = Field(default_factory=dict)
    trainer: str = ""
    at: float = 0.0

    @property
    def adapter(self) -> AdapterRef:
        """Identity of the version."""
        return AdapterRef(self.namespace, self.job, self.uid, self.agent, self.version)


class StepOutcome(StrEnum):
    """A step either made a new version, or had no signal and is counted all the same."""

    COMMITTED = "committed"
    NO_OP = "no_op"


class Difficulty(StrEnum):
    """What a group said of its task: members earned differently, or all earned the same, which was right or wrong."""

    VARIED = "varied"
    SOLVED = "solved"
    HOPELESS = "hopeless"


class TaskOutcome(Message):
    """How hard a training task was when it was visited; index: the task's, visit: the group's."""

    index: int
    visit: int
    difficulty: Difficulty


class StepRecord(JobMessage):
    """One finished step, exactly once; STEPS. Times are unix seconds; staleness in versions; faults by class during the step.

    indices: every group that was resolved in the step, with or without signal; reward_mean is over all of their episodes. outcomes: of jobs
    whose tasks may rest, the difficulty of each task resolved. num_dropped, dropped_tokens: groups that were too stale to train, and the tokens that
    were generated for them. skipped_*: visits to tasks that were left out since the step before.
    """

    step: int
    outcome: StepOutcome
    version: int
    at: float
    wall_s: float
    reward_mean: float
    reward_std: float
    indices: tuple[int, ...]
    num_groups: int
    num_episodes: int
    num_zero_variance: int = 0
    num_dropped: int = 0
    dropped_tokens: int = 0
    skipped_solved: int = 0
    skipped_hopeless: int = 0
    outcomes: tuple[TaskOutcome, ...] = ()
    staleness_mean: float = 0.0
    staleness_max: int = 0
    faults: dict[str, int] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)


class EvalSample(Message):
    """A held-out episode for people to read."""

    index: int
    prompt: str
    reply: str
    reward: float


class EvalRecord(JobMessage):
    """Mean reward on the held-out tasks at one version; STEPS, `eval.…`."""

    step: int
    version: int
    at: float
    reward_mean: float
    num_episodes: int
    faults: dict[str, int] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)
    samples: tuple[EvalSample, ...] = ()


class Phase(StrEnum):
    """Where a job is. The last two are final."""

    QUEUED = "Queued"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def final(self) -> bool:
        """Nothing more will happen to the job."""
        return self in (Phase.SUCCEEDED, Phase.FAILED)


class Progress(JobMessage):
    """KV `progress`: the level, last value wins; the orchestrator writes, the operator or `marlaas run` reads.

    reason: CamelCase, for machines; message: what is going on and what to do, for people. step: finished steps. promoted: per agent, the
    version that a succeeded job publishes. adapters: per agent, the folder in the blob store of its newest version, or of the promoted one.
    skipped_*: visits to tasks that rested, because they were always right or always wrong.
    """

    generation: int = 1
    phase: Phase
    admitted: bool
    reason: str
    message: str = ""
    step: int = 0
    steps: int
    versions: dict[str, int] = Field(default_factory=dict)
    promoted: dict[str, int] = Field(default_factory=dict)
    adapters: dict[str, str] = Field(default_factory=dict)
    reward: float | None = None
    eval_before: float | None = None
    eval_last: float | None = None
    staleness: float = 0.0
    tokens: int = 0
    tokens_per_s: float = 0.0
    accelerator_s: float = 0.0
    num_outstanding: int = 0
    skipped_solved: int = 0
    skipped_hopeless: int = 0
    faults: dict[str, int] = Field(default_factory=dict)
    started_at: float | None = None
    finished_at: float | None = None
    at: float = 0.0


class ReplicaReport(Message):
    """KV `replicas` (expiring): a worker is alive, what it can hold, and what it has proved. Tokens and seconds are totals since its start.

    verified: engine names of the adapter versions that this replica may serve now. job_tokens, job_engine_s: generated tokens and
    seconds of engine time by job uid. busy_s: time with a non-empty batch (rollout) or in forward/backward (trainer). broken: by job
    uid, the words in which this worker has given the job up.
    """

    role: Literal["rollout", "trainer", "orchestrator"]
    pool: str
    replica: str
    slots: int = 0
    max_rank: int = 0
    ready: bool = True
    verified: tuple[str, ...] = ()
    bound: tuple[str, ...] = ()
    num_running: int = 0
    job_tokens: dict[str, int] = Field(default_factory=dict)
    job_engine_s: dict[str, float] = Field(default_factory=dict)
    busy_s: float = 0.0
    wall_s: float = 0.0
    restarts: int = 0
    rss_bytes: int = 0
    broken: dict[str, str] = Field(default_factory=dict)
    at: float = 0.0


class PoolDocument(Message):
    """What a pool's rollout and trainer workers are started with (a file: ConfigMap or the local runner's)."""

    name: str
    model_path: str
    spec: ModelPoolSpec


class StoryEvent(JobMessage):
    """A sentence for `describe`; EVENTS. Nothing depends on it."""

    role: str
    at: float
    reason: str
    message: str
