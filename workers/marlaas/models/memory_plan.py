"""Plan of the memory of a pool's workers, part by part: for a card, from the model's facts; for a CPU, from `memory.demands`. Pure.

Peaks of the trainer are within 7 % of those measured on an H200 (tests/models/cases.yaml, `peaks`). The engine's parts other than
weights, slots and KV cache are estimates; no card has measured them yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from marlaas.models.memory import (
    USABLE,
    CacheRoom,
    PoolUse,
    activation_bytes,
    cache_room,
    cached_token,
    demands,
    gib,
    job_bytes,
    number_bytes,
    planned_tokens,
    trainer_activations,
)
from marlaas_api.numeric import quantity

if TYPE_CHECKING:
    from marlaas.models.inspection import ModelFacts
    from marlaas_api.kinds import ModelPoolSpec
    from marlaas_api.messages import JobSpec, PoolSpec

CONTEXT_BYTES = 768 << 20
"""CUDA context, cuBLAS workspaces and NCCL of a process. Not measured by us; the driver's tools show 500 to 700 MiB on Hopper."""
GRAPH_BYTES = 3 << 29
"""CUDA graphs of an engine (`vllm_settings.graph_sizes`). An estimate, of more sizes than there are now."""
STEP_TOKENS = 8192
"""Most tokens of an engine's step on a GPU."""
SCORED_BYTES = 7
"""Bytes of a vocabulary entry while vLLM scores a prompt: its logit in 16 bits, float32 log-softmax, and part of another copy. It computes all
tokens of a request that are in one step together."""
CHUNK_BYTES, CHUNK_COPIES = 256 << 20, 3
"""Logits that the trainer computes at once on a GPU (`trainer.head`): logits, their softmax, a temporary."""
RESERVE = 0.05
"""Part of a card that is left to fragmentation."""
ACTIVATION_PART = 0.75
"""Part of the memory that is left in a trainer which activations may have; the rest is for more agents and for publishing."""
_SAME_INPUT = frozenset({"k_proj", "v_proj", "up_proj"})
"""Layers whose input is kept for another layer: the input of `q_proj`, or of `gate_proj`."""
_ADDED = frozenset({"o_proj", "down_proj"})
"""Layers whose output is added to the residual stream and not kept."""
_MADE_AGAIN = "down_proj"
"""The layer whose input is made again in the backward pass (`trainer.lean_layers`)."""


class _Parts:
    """Parts of a worker's memory in bytes."""

    __slots__ = ()

    def parts(self) -> Iterator[tuple[str, int]]:
        """Yield the name and the bytes of each part that is there."""
        for one in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            if size := getattr(self, one.name):
                yield one.name.replace("_", " ").replace("kv", "KV").replace("cuda", "CUDA"), size

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(size for _, size in self.parts())


@dataclass(frozen=True, slots=True)
class EnginePlan(_Parts):
    """Memory of one engine in bytes. adapter_slots: on a CPU with the host's copies. context: of the process."""

    weights: int
    adapter_slots: int
    kv_cache: int
    activations: int
    cuda_graphs: int
    context: int


@dataclass(frozen=True, slots=True)
class TrainerPlan(_Parts):
    """Memory of one trainer in bytes.

    agents: adapters, gradients and optimizer moments, in float32. activations: kept between forward and backward pass. workspace: logits
    of a chunk, and gradients of a layer's widest activations. context: of the process.
    """

    weights: int
    agents: int
    activations: int
    workspace: int
    context: int


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """Activations of a trainer in bytes: of a token as it is and with recomputed layers, and the most that a micro-batch may keep.

    left: memory that is left for activations and for more agents.
    """

    kept: float
    recomputed: float
    limit: int
    left: int

    def __str__(self) -> str:
        tokens = [int(self.limit / max(1.0, size)) for size in (self.kept, self.recomputed)]
        return f"{tokens[0]:,} tokens as they are, {tokens[1]:,} with recomputed layers"


def kept_bytes(facts: ModelFacts, number: int, rank: int) -> float:
    """Return the bytes that a token keeps between forward and backward pass, without recomputation.

    These are: the inputs of two norms a layer; the input of each group of linear layers except `down_proj`; queries, keys, values and
    the attention's output; gate and up; `rank` values of each adapter. Counted (`bench.gpu operations`, bf16, rank 16): 3.4 MiB at 8B.

    Args:
        number: bytes of a number of the base model.
    """
    values = sum(len(shapes) * rank for shapes in facts.linear_layers.values())
    for name, shapes in facts.linear_layers.items():
        for out, into in shapes:
            values += into * (name not in _SAME_INPUT and name != _MADE_AGAIN) + out * (name not in _ADDED)
    return number * (values + 2 * facts.hidden_size * facts.num_layers)


def engine_plan(facts: ModelFacts, spec: ModelPoolSpec | PoolSpec, spare: int = 0) -> EnginePlan:
    """Return the plan of an engine on a GPU.

    An unset `kvCacheBytes` is the memory of one conversation of the greatest length, without which vLLM does not start, and `spare`.
    """
    number = number_bytes(spec, on_gpu=True)
    token_bytes, longest = cached_token(facts, spec, on_gpu=True)
    given = spec.rollout.kv_cache_bytes if spec.rollout.engine == "vllm" else "0"
    step = STEP_TOKENS * number * (2 * _widest(facts) + 4 * facts.hidden_size)
    scored = min(STEP_TOKENS, spec.rollout.max_model_len) * SCORED_BYTES * facts.vocab_size
    return EnginePlan(
        weights=facts.num_parameters * number,
        adapter_slots=(spec.adapter_slots + 1) * facts.adapter_parameters(spec.max_rank) * number,
        kv_cache=token_bytes * longest + max(0, spare) if given is None else int(quantity(given)),
        activations=max(step, scored) + CHUNK_COPIES * 4 * spec.rollout.max_num_seqs * facts.vocab_size,
        cuda_graphs=GRAPH_BYTES,
        context=CONTEXT_BYTES,
    )


def trainer_plan(
    facts: ModelFacts, spec: ModelPoolSpec | PoolSpec, jobs: Sequence[JobSpec] = (), spare: int = 0
) -> tuple[TrainerPlan, MicroBatches]:
    """Return the plan of a trainer on a GPU, with the agents of the largest job, or one agent at `maxRank`, and its activations.

    An unset `activationBytes` is a part of the memory of the largest micro-batch with recomputed layers, and `spare`. Activations that
    need more than the limit take the limit, because no more layers are recomputed than necessary (`trainer.memory`).
    """
    number, (rank, tokens) = number_bytes(spec, on_gpu=True), planned_tokens(spec, jobs)
    kept, given = kept_bytes(facts, number, rank), spec.trainer.activation_bytes
    recomputed = number * facts.hidden_size * facts.num_layers + kept / max(1, facts.num_layers)
    left = int(tokens * recomputed) + max(0, spare)
    limit = activation_limit(left) if given is None else int(quantity(given))
    activations = int(min(tokens * kept, max(tokens * recomputed, limit)))
    if given is not None:  # `spare` is what a plan with these activations leaves
        left = activations + max(0, spare)
    plan = TrainerPlan(
        weights=facts.num_parameters * number,
        agents=max(job_bytes(facts, spec.max_rank, jobs)),
        activations=activations,
        workspace=CHUNK_COPIES * CHUNK_BYTES + 4 * number * tokens * _widest(facts),
        context=CONTEXT_BYTES,
    )
    return plan, MicroBatches(kept, recomputed, limit, left)


def activation_limit(left: int) -> int:
    """Return an unset `activationBytes`. left: memory that is left in a trainer after loading, without its workspace and its agents."""
    return int(ACTIVATION_PART * max(0, left))


def _widest(facts: ModelFacts) -> int:
    return max((max(shape) for shapes in facts.linear_layers.values() for shape in shapes), default=0)


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Plan of a pool: one engine, one trainer, and what fits into them.

    memory: bytes that an engine and a trainer have: the card's without the reserve, or the requests of their pods; None if unknown.
    shared: engine and trainer on one card, in this order; None on a CPU.
    room: the KV cache; None if the engine has none, or the architecture is unknown.
    """

    engine: EnginePlan
    trainer: TrainerPlan
    memory: tuple[int | None, int | None]
    micro_batches: MicroBatches
    room: CacheRoom | None
    shared: tuple[EnginePlan, TrainerPlan] | None = None

    def refusals(self) -> Iterator[tuple[str, str]]:
        """Yield the role, and a sentence with the numbers, of each worker that does not fit its memory."""
        workers: tuple[tuple[str, EnginePlan | TrainerPlan], ...] = (
            ("rollout", self.engine),
            ("trainer", self.trainer),
        )
        for (role, plan), memory in zip(workers, self.memory, strict=True):
            if memory is not None and plan.total > memory:
                yield role, refusal(_WORKER[role], plan, memory)


_WORKER = {"rollout": "an engine", "trainer": "a trainer"}
_REMEDY = {
    "an engine": "choose a smaller model, or lower kvCacheBytes, maxModelLen, adapterSlots or maxRank",
    "a trainer": "choose a smaller model, or lower microbatchTokens, activationBytes or ranks",
}


def refusal(worker: str, plan: EnginePlan | TrainerPlan, memory: int) -> str:
    """Return the sentence that a worker's plan does not fit."""
    parts = " + ".join(f"{name} {gib(size)}" for name, size in plan.parts())
    return (
        f"{worker} needs {gib(plan.total)} GiB, and {gib(memory)} GiB may be used (in GiB, {parts}): {_REMEDY[worker]}"
    )


def usable(card: int) -> int:
    """Return the part of a card's memory that a plan may use."""
    return int((1 - RESERVE) * card)


def plan_on_card(
    facts: ModelFacts, spec: ModelPoolSpec, jobs: Sequence[JobSpec] = (), card: int | None = None
) -> PoolPlan:
    """Return the plan of a pool whose engine and trainer have a card each, and of both on one.

    card: bytes of a card; None if it is unknown, then unset values are the least with which the workers start.
    """
    engine, (trainer, _) = engine_plan(facts, spec), trainer_plan(facts, spec, jobs)
    there = usable(card) if card is not None else 0
    spare = max(0, there - engine.total - trainer.total) // 2
    shared = engine_plan(facts, spec, spare), trainer_plan(facts, spec, jobs, spare)[0]
    engine = engine_plan(facts, spec, there - engine.total)
    trainer, sizes = trainer_plan(facts, spec, jobs, there - trainer.total)
    room = cache_room(facts, spec, on_gpu=True, size=engine.kv_cache)
    return PoolPlan(engine, trainer, (there or None, there or None), sizes, room, shared)


@dataclass(frozen=True, slots=True)
class CardShare:
    """A pool's part of the cards. spec: with values of unset `kvCacheBytes` and `activationBytes`. agent_room: bytes for a trainer's agents."""

    spec: ModelPoolSpec
    agent_room: int


def card_shortage(cards: Sequence[int], pools: Sequence[PoolUse]) -> str | None:
    """Return the sentence that the workers of these pools do not fit a machine's cards; None if they do. cards: their bytes."""
    there, most = sum(map(usable, cards)), max(map(usable, cards))
    plans = [one for pool in pools for one in _least(pool)]
    for worker, plan, _ in plans:
        if plan.total > most:
            return refusal(worker, plan, most)
    total = sum(num * plan.total for _, plan, num in plans)
    if total <= there:
        return None
    parts = "; ".join(f"{worker}{f' x {num}' if num > 1 else ''} {gib(plan.total)}" for worker, plan, num in plans)
    return (
        f"the workers need {gib(total)} GiB of GPU memory together, and {gib(there)} GiB may be used (in GiB, {parts}): choose a smaller "
        "model or fewer replicas, or lower kvCacheBytes, maxModelLen, adapterSlots, maxRank or microbatchTokens"
    )


def card_shares(cards: Sequence[int], pools: Sequence[PoolUse]) -> list[CardShare]:
    """Divide a machine's cards among the workers of `marlaas run`. cards: free bytes.

    Each worker gets an equal part of what the least plans of all workers leave. A KV cache gets no more than `maxNumSeqs`
    conversations of the greatest length.
    """
    plans = [one for pool in pools for one in _least(pool)]
    left = sum(map(usable, cards)) - sum(num * plan.total for _, plan, num in plans)
    part, most = max(0, left // max(1, sum(num for *_, num in plans))), max(map(usable, cards))
    return [_share(pool, part, most) for pool in pools]


def _least(pool: PoolUse) -> list[tuple[str, EnginePlan | TrainerPlan, int]]:
    """Return the least plan of each kind of worker, and the number of workers."""
    engine, trainer = engine_plan(pool.facts, pool.spec), trainer_plan(pool.facts, pool.spec, pool.jobs)[0]
    return [("an engine", engine, pool.spec.rollout.replicas), ("a trainer", trainer, pool.spec.trainer.replicas)]


def _share(pool: PoolUse, part: int, most: int) -> CardShare:
    facts, spec = pool.facts, pool.spec
    spares = [min(part, max(0, most - plan.total)) for _, plan, _ in _least(pool)]
    token_bytes, longest = cached_token(facts, spec, on_gpu=True)
    cache = min(engine_plan(facts, spec, spares[0]).kv_cache, token_bytes * longest * spec.rollout.max_num_seqs)
    plan, sizes = trainer_plan(facts, spec, pool.jobs, spares[1])
    rollout, trainer = spec.rollout, spec.trainer
    if rollout.kv_cache_bytes is None and cache:
        rollout = rollout.model_copy(update={"kv_cache_bytes": str(cache)})
    if trainer.activation_bytes is None:
        trainer = trainer.model_copy(update={"activation_bytes": str(sizes.limit)})
    room = plan.agents + int(USABLE * max(0, sizes.left - max(sizes.limit, plan.activations)))
    return CardShare(spec.model_copy(update={"rollout": rollout, "trainer": trainer}), room)


def plan_on_cpu(facts: ModelFacts, spec: ModelPoolSpec, jobs: Sequence[JobSpec] = ()) -> PoolPlan:
    """Return the plan of a pool on CPUs, from the estimates of `memory.demands`, beside the memory that its pods request."""
    engine, trainer = (list(demand.parts.values()) for demand in demands(facts, spec, jobs))
    weights, *cache, adapters, process = engine
    rank, _ = planned_tokens(spec, jobs)
    least = spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"activation_bytes": "0"})})
    kept, recomputed = activation_bytes(facts, spec, rank, 1), activation_bytes(facts, least, rank, 1)
    limit = trainer_activations(spec)
    asked = [None if memory is None else int(quantity(memory)) for memory in (spec.rollout.memory, spec.trainer.memory)]
    return PoolPlan(
        EnginePlan(weights, adapters, sum(cache), 0, 0, process),
        TrainerPlan(trainer[0], trainer[1], trainer[2], 0, trainer[3]),
        (asked[0], asked[1]),
        MicroBatches(kept, recomputed, limit, limit),
        cache_room(facts, spec, on_gpu=False),
    )
