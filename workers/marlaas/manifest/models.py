"""Check the base models of pools: they exist, can be adapted, have the layers that jobs target, and fit this machine.

Models on this disk are inspected (`marlaas.models.inspect`: headers only). A hub model that was never fetched
cannot be checked here; the workers check it when they start.
"""

from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from marlaas.manifest.crosscheck import ManifestObjects
from marlaas.manifest.findings import Finding, Placed
from marlaas.manifest.plans import Known, memory_plans, refused, too_big_for, users_of
from marlaas.manifest.references import base_model_notes
from marlaas.manifest.templates import template_errors, template_notes, text_errors
from marlaas.manifest.vocabularies import vocabulary_problems
from marlaas.models import ModelError, ModelFacts, inspect, list_models, prepared, resolve
from marlaas.models.architectures import ADAPTABLE
from marlaas.models.cards import cards
from marlaas.models.hub import cached
from marlaas.models.memory import (
    CPU_KV_CACHE,
    CacheRoom,
    Demand,
    Machine,
    cache_room,
    demands,
    has_gpu,
    machine,
    shortage,
)
from marlaas.models.memory_plan import PoolPlan
from marlaas_api.kinds import ModelPool, ModelSpec, RLJob
from marlaas_api.kinds.checks import pool_text
from marlaas_api.kinds.fields import did_you_mean, listed
from marlaas_api.kinds.problems import Loc, Problem

_MODEL = ("spec", "model")
_LARGE, _STEEP = 1_000_000_000, 1e-3
"""Parameters of a model, and the learning rate above which its jobs get a note."""
_GROUP = 8
"""Conversations that a KV cache should hold at least: the default groupSize."""
_WORKERS_NEED = ("torch", "transformers", "peft")


def check_models(contents: ManifestObjects, runnable: bool) -> Iterator[Finding]:
    """Yield errors of pools' models. If `runnable`, also missing packages and models, and too little memory."""
    here = machine() if runnable and not has_gpu() else None
    known = []
    yield from text_errors(contents)
    for pool in contents.pools:
        if runnable:
            yield from pool.source.findings(missing_packages(pool.object))
        try:
            facts = _facts(pool.object.spec.model, runnable)
        except ModelError as error:
            yield pool.source.finding(Problem((*_MODEL, _source(pool.object.spec.model)), str(error)))
            continue
        if facts is not None:
            known.append((pool, facts))
            yield from pool.source.findings(unadaptable(facts, pool.object))
            yield from _wrong_targets(contents, pool.object, facts)
            yield from _too_long(contents, pool.object, facts)
            yield from _template_errors(contents, pool, facts, runnable)
    there = ((pool.object.metadata.name, model_folder(pool.object.spec.model, runnable)) for pool, _ in known)
    folders = {name: folder for name, folder in there if folder is not None}
    for job in contents.jobs:
        yield from job.source.findings(vocabulary_problems(job.object, folders))
    if here is not None:
        yield from _too_big(contents, known, here.limit)
    elif runnable:
        yield from too_big_for(contents, known, cards())


def known_pools(contents: ManifestObjects) -> Known:
    """Return the pools whose models are on this machine, with the models' facts. Raises ModelError."""
    found = ((pool, _facts(pool.object.spec.model, runnable=False)) for pool in contents.pools)
    return [(pool, facts) for pool, facts in found if facts is not None]


def plan_memory(contents: ManifestObjects, card: int | None) -> tuple[dict[str, PoolPlan], list[Finding]]:
    """Return the plans of the pools' memory, and the workers that do not fit the card. card: its bytes; None: not given."""
    known = known_pools(contents)
    plans = memory_plans(contents, known, on_gpu=has_gpu(), card=card)
    return plans, list(refused(known, plans))


def _template_errors(
    contents: ManifestObjects, pool: Placed[ModelPool], facts: ModelFacts, runnable: bool
) -> Iterator[Finding]:
    model = pool.object.spec.model
    folder = model_folder(model, runnable)
    try:
        yield from () if folder is None else template_errors(contents, pool, folder, facts)
    except ModelError as error:
        yield pool.source.finding(Problem((*_MODEL, _source(model)), str(error)))


def model_notes(contents: ManifestObjects, runnable: bool) -> Iterator[Finding]:
    """Yield notes on pools' models that are not errors.

    If `runnable`: models that fit the machine, but not into the memory that is free now. Else: problems that would
    prevent a local run.
    """
    here: Machine | None = None if has_gpu() else machine()
    known = []
    for pool in contents.pools:
        facts = _facts(pool.object.spec.model, runnable=False)
        yield from pool.source.findings(_shorter(pool.object, facts))
        yield from pool.source.findings(() if has_gpu() else _no_gpu(pool.object))
        yield from _other_bases(contents, pool.object)
        if facts is not None:
            known.append((pool, facts))
            yield from pool.source.findings(_experts(pool.object, facts))
            yield from pool.source.findings(_small_cache(contents, pool.object, facts))
            yield from _steep(contents, pool.object, facts)
            folder = model_folder(pool.object.spec.model, runnable=False)
            yield from () if folder is None else template_notes(contents, pool, folder, facts, runnable=runnable)
        elif not runnable:
            yield from pool.source.findings(_not_here(pool.object))
    if here is not None and runnable:
        yield from _too_big(contents, known, here.free, " now, because of what else runs on this machine")
    elif here is not None:
        yield from _too_big(contents, known, here.limit, " on this machine, so `marlaas run` refuses it here")
    elif not runnable:
        yield from too_big_for(contents, known, cards(), "; `marlaas run` refuses it on this machine")


def _other_bases(contents: ManifestObjects, pool: ModelPool) -> Iterator[Finding]:
    """Yield adapters of jobs that name another base model than the pool's. A claim's model is known by its trainer only."""
    model = pool.spec.model
    folder = prepared(model.builtin) if model.builtin is not None else Path(model.path) if model.path else None
    name = model.hub.id if model.hub is not None else folder.name if folder is not None else None
    revision = model.hub.revision if model.hub is not None else None
    for job in contents.jobs if name is not None else ():
        yield from job.source.findings(base_model_notes(job.object, pool, str(name), revision))


def _not_here(pool: ModelPool) -> Iterator[Problem]:
    if pool.spec.model.path is not None:
        try:
            resolve(pool.spec.model)
        except ModelError as error:
            yield Problem(
                (*_MODEL, "path"), f"{error}; `marlaas run` needs it on this machine, and a cluster on its workers"
            )


def _no_gpu(pool: ModelPool) -> Iterator[Problem]:
    """Yield notes on requested GPUs: those apply to a cluster, and a local run uses the hardware of the machine."""
    for role, workers in (("rollout", pool.spec.rollout), ("trainer", pool.spec.trainer)):
        if workers.gpus:
            text = f"gpus is {workers.gpus}, and this machine has no GPU: `marlaas run` computes on the CPU here"
            yield Problem(("spec", role, "gpus"), text)


def _shorter(pool: ModelPool, facts: ModelFacts | None) -> Iterator[Problem]:
    most, wanted = facts.max_positions if facts is not None else None, pool.spec.rollout.max_model_len
    if most is not None and most < wanted and "max_model_len" in pool.spec.rollout.model_fields_set:
        text = f"maxModelLen {wanted} exceeds the model's context of {most} tokens; engines accept conversations of up to {most} tokens"
        yield Problem(("spec", "rollout", "maxModelLen"), text)


def cache_rooms(contents: ManifestObjects) -> dict[str, str]:
    """Return by pool how many conversations its KV cache holds, of pools whose models are on this machine."""
    rooms = {}
    for pool in contents.pools:
        facts = _facts(pool.object.spec.model, runnable=False)
        room = _room(pool.object, facts) if facts is not None else None
        if room is not None:
            rooms[pool.object.metadata.name] = str(room)
    return rooms


def _room(pool: ModelPool, facts: ModelFacts) -> CacheRoom | None:
    return cache_room(facts, pool.spec, on_gpu=pool.spec.rollout.gpus > 0 or has_gpu())


def _small_cache(contents: ManifestObjects, pool: ModelPool, facts: ModelFacts) -> Iterator[Problem]:
    """Yield a KV cache that does not hold one group of the greatest length: its episodes wait for each other."""
    sizes = [
        job.object.spec.rollout.group_size for job in contents.jobs if job.object.spec.agents_on(pool.metadata.name)
    ]
    room, wanted = _room(pool, facts), max([_GROUP, *sizes])
    if room is not None and room.num_sequences < wanted:
        effect = "vLLM does not start" if room.num_sequences < 1 else f"a group of {wanted} waits or is computed again"
        yield Problem(
            ("spec", "rollout", "kvCacheBytes"),
            f"{pool.spec.rollout.kv_cache_bytes or CPU_KV_CACHE} holds {room}, so {effect}; set {room.needed(wanted)} or lower maxModelLen",
        )


def _steep(contents: ManifestObjects, pool: ModelPool, facts: ModelFacts) -> Iterator[Finding]:
    """Yield learning rates that large models rarely learn at."""
    if facts.num_parameters < _LARGE:
        return
    for job in contents.jobs:
        rate = job.object.spec.training.optimizer.learning_rate
        if rate > _STEEP and job.object.spec.agents_on(pool.metadata.name):
            text = (
                f"learningRate {rate:g} rarely works for a model of {facts.num_parameters / 1e9:.1f} billion parameters: "
                "begin with 1e-4, or 3e-5 for one above 10 billion (docs/reference/algorithms.md, Start here)"
            )
            yield job.source.finding(Problem(("spec", "training", "optimizer", "learningRate"), text))


def _experts(pool: ModelPool, facts: ModelFacts) -> Iterator[Problem]:
    if facts.num_expert_parameters:
        share = facts.num_expert_parameters / facts.num_parameters
        yield Problem(
            (*_MODEL, _source(pool.spec.model)),
            f"the model is a mixture of experts, and adapters change only its {listed(list(facts.linear_layers))}; "
            f"experts and routers, {share:.0%} of the parameters, stay as they are",
        )


def _too_long(contents: ManifestObjects, pool: ModelPool, facts: ModelFacts) -> Iterator[Finding]:
    """Yield jobs whose `maxTokens` alone fills the model's context. `kinds.checks` already reports values beyond `maxModelLen`."""
    most = facts.max_positions
    for job in contents.jobs if most is not None else ():
        tokens = job.object.spec.rollout.max_tokens
        is_ours = bool(job.object.spec.agents_on(pool.metadata.name))
        if is_ours and most is not None and most <= tokens < pool.spec.rollout.max_model_len:
            text = (
                f"maxTokens {tokens} leaves no room for a prompt: the base model of {pool_text(job.object, pool.metadata.name)} has a "
                f"context of {most} tokens; lower maxTokens or choose a pool with another model"
            )
            yield job.source.finding(Problem(("spec", "rollout", "maxTokens"), text))


def _wrong_targets(contents: ManifestObjects, pool: ModelPool, facts: ModelFacts) -> Iterator[Finding]:
    if pool.spec.model.builtin is None:  # `kinds.checks` checks the targets of builtin models without inspecting files
        for job in contents.jobs:
            yield from job.source.findings(unknown_targets(facts, job.object, pool.metadata.name))


def missing_packages(pool: ModelPool) -> Iterator[Problem]:
    """Yield Python packages that the pool's workers need and this installation lacks. They are searched, not imported."""
    how = "install MARLaaS with its extra cpu or gpu: pip install 'marlaas[cpu]'"
    lacking = [name for name in _WORKERS_NEED if find_spec(name) is None]
    if lacking:
        yield Problem(("spec",), f"its workers need {listed(lacking)}, which this machine lacks; {how}")
    if pool.spec.rollout.engine == "vllm" and find_spec("vllm") is None:
        text = f"the Python package vllm is not installed; {how} (the engine `reference` does not need it, and is slow)"
        yield Problem(("spec", "rollout", "engine"), text)


def unadaptable(facts: ModelFacts, pool: ModelPool) -> Iterator[Problem]:
    """Yield the reason why the pool's engine cannot serve adapters of the model."""
    loc = (*_MODEL, _source(pool.spec.model))
    if pool.spec.rollout.engine == "vllm" and not ADAPTABLE & set(facts.architectures):
        names = listed([f"'{name}'" for name in facts.architectures]) if facts.architectures else "not named"
        yield Problem(
            loc,
            f"the model's architecture is {names}, and vLLM serves LoRA adapters only for {len(ADAPTABLE)} others "
            "(LlamaForCausalLM, Qwen3ForCausalLM, …; docs/reference/models.md lists them); choose one of those",
        )
    elif not facts.linear_layers:
        yield Problem(loc, "the model has no linear layers for an adapter; choose another model")


def unknown_targets(facts: ModelFacts, job: RLJob, pool: str) -> Iterator[Problem]:
    """Yield adapter targets of the agents on a pool that are not linear layers of its model, each with the nearest valid name."""
    names = list(facts.linear_layers)
    for at, agent in job.spec.agents_on(pool) if names else ():
        for position, target in enumerate(agent.adapter.targets):
            if target not in facts.linear_layers:
                loc: Loc = ("spec", "agents", at, "adapter", "targets", position)
                text = f"the model has no linear layer '{target}'; it has {listed(names)}"
                yield Problem(loc, f"{text}{did_you_mean(target, names)}")


def _facts(model: ModelSpec, runnable: bool) -> ModelFacts | None:
    """Return the facts of a model; None if it is not on this machine. Raises ModelError."""
    folder = model_folder(model, runnable)
    return None if folder is None else inspect(folder)


def model_folder(model: ModelSpec, runnable: bool) -> Path | None:
    """Return the folder of a model; None if it is not on this machine. Raises ModelError.

    If not `runnable`, a path may belong to another machine, so a missing one is not an error.
    """
    if model.builtin is not None:
        _known(model.builtin)
        return prepared(model.builtin)
    if model.path is not None:
        there = (Path(model.path).expanduser() / "config.json").is_file()
        return resolve(model) if runnable or there else None
    return cached(model.hub.id, model.hub.revision) if model.hub is not None else None


def _known(name: str) -> None:
    names = [model.name for model in list_models()]
    if name not in names:
        text = f"builtin model '{name}' does not exist; the builtin models are {listed(names)}"
        raise ModelError(f"{text}{did_you_mean(name, names)}")


def _too_big(
    contents: ManifestObjects, known: Sequence[tuple[Placed[ModelPool], ModelFacts]], available: int, when: str = ""
) -> Iterator[Finding]:
    """Yield a finding if all pools together exceed the memory, placed at the pool that needs most."""
    needs = [(pool, demands(facts, pool.object.spec, users_of(contents, pool.object))) for pool, facts in known]
    text = shortage([demand for _, some in needs for demand in some], available)
    if text is not None:
        pool = max(needs, key=lambda need: _total(need[1]))[0]
        yield pool.source.finding(Problem(_MODEL, f"{text[0]}{when}{text[1]}"))


def _total(some: Iterable[Demand]) -> int:
    return sum(demand.total for demand in some)


def _source(model: ModelSpec) -> str:
    return next(name for name in ("builtin", "path", "pvc", "hub") if getattr(model, name) is not None)
