"""Checks beyond the schema: unsupported features, and whether a job fits its pool. Pure.

Every check yields problems (refused) or remarks (reported, not refused). Their location is in the job unless the
check's docstring names another object.
"""

import math
from collections.abc import Collection, Iterator, Mapping

from marlaas_api.kinds.agent_checks import check_agents
from marlaas_api.kinds.fields import did_you_mean, listed
from marlaas_api.kinds.modelpool import ModelPool, SandboxBounds
from marlaas_api.kinds.problems import Loc, Problem
from marlaas_api.kinds.rljob import RLJob
from marlaas_api.kinds.training import RolloutSpec
from marlaas_api.numeric import quantity, slots_needed

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of a Llama-like model; all builtin models are Llama-like."""


_SMALL_GROUP = 4
_LONGEST_REPOSITORY = 96
_LEAST_BYTES, _UNITS = 2**20, "mkKi"


def check_supported(job: RLJob) -> Iterator[Problem]:
    """Yield the features of a job that the schema allows but this version of MARLaaS does not support anywhere."""
    yield from check_agents(job.spec)
    yield from _repositories(job)
    yield from _bytes(("spec", "environment", "memory"), job.spec.environment.memory)


def check_supported_pool(pool: ModelPool) -> Iterator[Problem]:
    """Yield the features of a pool that the schema allows but this version's workers do not support; located in the pool."""
    rollout, trainer = pool.spec.rollout, pool.spec.trainer
    yield from _bytes(("spec", "rollout", "memory"), rollout.memory)
    yield from _bytes(("spec", "rollout", "kvCacheBytes"), rollout.kv_cache_bytes)
    yield from _bytes(("spec", "trainer", "memory"), trainer.memory)
    yield from _bytes(("spec", "sandbox", "maxMemory"), pool.spec.sandbox.max_memory)
    if pool.spec.tensor_parallel_size > 1:
        yield Problem(
            ("spec", "tensorParallelSize"),
            f"this version of MARLaaS supports only tensorParallelSize 1, because it cannot yet verify the adapters of an engine on several "
            f"accelerators; found {pool.spec.tensor_parallel_size}",
        )


def _repositories(job: RLJob) -> Iterator[Problem]:
    """Yield the repositories whose names match the schema, and that the hub does not take."""
    for name in job.spec.hub_repositories:
        if len(name) > _LONGEST_REPOSITORY:
            text = f"the repository {name} has {len(name)} characters; the hub takes at most {_LONGEST_REPOSITORY}"
            yield Problem(("spec", "export", "hub", "repo"), text)
        elif name.endswith(".git"):
            yield Problem(("spec", "export", "hub", "repo"), f"the hub takes no name that ends with .git: {name}")


def _bytes(loc: Loc, amount: str | None) -> Iterator[Problem]:
    """Yield a problem for less than 1 MiB: a forgotten unit, or the suffix m, which is a thousandth."""
    if amount is not None and quantity(amount) < _LEAST_BYTES:
        meant = f"{amount.rstrip(_UNITS)}Mi"
        yield Problem(loc, f"{loc[-1]} {amount} is only {quantity(amount):g} bytes; did you mean {meant}?")


def check_cluster(job: RLJob) -> Iterator[Problem]:
    """Yield what a cluster needs of a job and `marlaas run` does not."""
    if job.spec.export.hub is not None and job.spec.export.hub.token_secret_ref is None:
        text = "a cluster takes the hub's token from a Secret of the job's namespace, and refuses the job without; add tokenSecretRef: {name, key}"
        yield Problem(("spec", "export", "hub"), text)
    if job.spec.export.s3 is not None and job.spec.export.s3.secret_ref is None:
        text = "a cluster takes the bucket's keys from a Secret of the job's namespace, and refuses the job without; add secretRef: {name}"
        yield Problem(("spec", "export", "s3"), text)


def check_local(job: RLJob) -> Iterator[Problem]:
    """Yield the features of a job that need a cluster; `marlaas run` refuses them."""
    environment = ("spec", "environment")
    if job.spec.environment.image is not None:
        yield Problem(
            (*environment, "image"),
            "container images need a cluster; for `marlaas run`, set name instead: a builtin environment or module:attribute",
        )
    if job.spec.environment.secret_refs:
        yield Problem(
            (*environment, "secretRefs"),
            "Secrets need a cluster; for `marlaas run`, remove secretRefs and set MARLAAS_ENVIRONMENT_NAME=value in your shell for each variable: the environment finds it as NAME",
        )


def check_local_pool(pool: ModelPool) -> Iterator[Problem]:
    """Yield the features of a pool that need a cluster; located in the pool."""
    if pool.spec.model.pvc is not None:
        yield Problem(
            ("spec", "model", "pvc"),
            "volumes need a cluster; for `marlaas run`, set path, hub or builtin instead",
        )

    if pool.spec.model.hub is not None and pool.spec.model.hub.token_secret_ref is not None:
        yield Problem(
            ("spec", "model", "hub", "tokenSecretRef"),
            "Secrets need a cluster; for `marlaas run`, remove tokenSecretRef and set HF_TOKEN in your shell",
        )


def check_fit(job: RLJob, pool: ModelPool) -> Iterator[Problem]:
    """Yield the limits of one of the job's pools that its agents there exceed, with the numbers of both sides.

    The job's own pool also bounds its sandboxes.
    """
    yield from _namespace(job, pool)
    yield from _rank(job, pool)
    yield from _slots(job, pool)
    yield from _length(job, pool)
    yield from _targets(job, pool)
    yield from _memory(job, pool)


def remarks(job: RLJob, pools: Collection[ModelPool]) -> Iterator[Problem]:
    """Yield settings that are allowed but probably unintended. pools: those of the job's pools that are known."""
    spec = job.spec
    for at, agent in enumerate(spec.agents):
        scale = agent.adapter.alpha / agent.adapter.rank
        if not _is_power_of_two(scale):
            yield Problem(
                ("spec", "agents", at, "adapter", "alpha"),
                f"alpha / rank is {scale:g}, which is not a power of two: engine and trainer will round the adapter differently",
            )
    if spec.environment.egress:
        yield Problem(
            ("spec", "environment", "egress"), "enforced only in a cluster; `marlaas run` does not restrict the network"
        )
    yield from _objective(job)
    yield from _window(job, {pool.metadata.name: pool for pool in pools})
    if spec.rollout.max_turns > 1:
        for pool in pools:
            yield from _context(job, pool)


def _objective(job: RLJob) -> Iterator[Problem]:
    """Yield terms of the loss without effect, or with less effect than the setting suggests."""
    training = job.spec.training
    size = job.spec.rollout.group_size
    if training.algorithm == "sft":
        if size not in (1, RolloutSpec().group_size):
            text = f"groupSize {size} has no effect with sft: a demonstration is a group of one; remove it"
            yield Problem(("spec", "rollout", "groupSize"), text)
        return
    if training.algorithm != "distill" and 1 < size < _SMALL_GROUP and training.baseline.type == "group":
        yield Problem(
            ("spec", "rollout", "groupSize"),
            f"groupSize {size} compares each reward with {size - 1} other{'s' if size > 2 else ''}: advantages are noisy, and many groups have no "
            "signal; 8 to 16 is usual",
        )
    if training.ratio == "behaviour" or training.algorithm == "cispo":
        return
    has_one_update = training.updates_per_step * training.epochs == 1
    if has_one_update and (training.clip.low is not None or training.clip.high is not None):
        yield Problem(
            ("spec", "training", "clip"),
            "clip has no effect with ratio: proximal and one update a step; remove it, raise updatesPerStep, or choose ratio: behaviour",
        )
    if training.correction.type == "none" and training.max_staleness > 0:
        yield Problem(
            ("spec", "training", "correction", "type"),
            f"with ratio: proximal and correction none, tokens up to {training.max_staleness} versions old are trained without importance weights, as "
            "if the newest version had sampled them; choose truncated, or ratio: behaviour",
        )


def _window(job: RLJob, pools: Mapping[str, ModelPool]) -> Iterator[Problem]:
    """Yield a teacher whose context is shorter than that of an agent that it scores."""
    spec, distillation = job.spec, job.spec.training.distillation
    names = {agent.name: spec.pool_of(agent) for agent in spec.agents}
    theirs = pools.get(names.get(distillation.teacher, "")) if distillation is not None else None
    if theirs is None:
        return
    most = theirs.spec.rollout.max_model_len
    for name in dict.fromkeys(names[agent.name] for agent in spec.agents if agent.trainable):
        own = pools.get(name)
        if own is not None and most < (longest := own.spec.rollout.max_model_len):
            yield Problem(
                ("spec", "training", "distillation", "teacher"),
                f"maxModelLen is {most} in {_named(job, theirs)} and {longest} in {_named(job, own)}: tokens beyond the teacher's context are "
                "not trained",
            )


def cluster_remarks(job: RLJob) -> Iterator[Problem]:
    """Yield the given fields of a job that a cluster uses and `marlaas run` ignores."""
    environment = job.spec.environment
    given: dict[Loc, bool] = {
        ("spec", "environment", "imagePullSecrets"): bool(environment.image_pull_secrets),
        ("spec", "environment", "cpu"): environment.cpu is not None,
        ("spec", "backoffLimit"): "backoff_limit" in job.spec.model_fields_set,
    }
    yield from _left_to_a_cluster(given)


def pool_remarks(pool: ModelPool) -> Iterator[Problem]:
    """Yield the given fields of a pool that a cluster uses and `marlaas run` ignores; located in the pool."""
    given: dict[Loc, bool] = {("spec", "sandbox"): pool.spec.sandbox != SandboxBounds()}
    for role, workers in (("rollout", pool.spec.rollout), ("trainer", pool.spec.trainer)):
        at = ("spec", role)
        given |= {
            (*at, "nodeSelector"): bool(workers.node_selector),
            (*at, "tolerations"): bool(workers.tolerations),
            (*at, "affinity"): bool(workers.affinity),
            (*at, "priorityClassName"): workers.priority_class_name is not None,
            (*at, "image"): workers.image is not None,
            (*at, "imagePullSecrets"): bool(workers.image_pull_secrets),
        }
    yield from _left_to_a_cluster(given)


def _left_to_a_cluster(given: Mapping[Loc, bool]) -> Iterator[Problem]:
    return (Problem(loc, "used only in a cluster; `marlaas run` ignores it") for loc, there in given.items() if there)


def _namespace(job: RLJob, pool: ModelPool) -> Iterator[Problem]:
    allowed = pool.spec.namespaces
    if allowed and job.metadata.namespace not in allowed:
        yield Problem(
            ("metadata", "namespace"),
            f"namespace '{job.metadata.namespace}' may not use {_named(job, pool)}, which allows only {listed(allowed)}",
        )


def _rank(job: RLJob, pool: ModelPool) -> Iterator[Problem]:
    for at, agent in job.spec.agents_on(pool.metadata.name):
        if agent.adapter.rank > pool.spec.max_rank:
            yield Problem(
                ("spec", "agents", at, "adapter", "rank"),
                f"rank {agent.adapter.rank} is above maxRank {pool.spec.max_rank} of {_named(job, pool)}; "
                "lower the rank or raise the pool's maxRank",
            )


def _slots(job: RLJob, pool: ModelPool) -> Iterator[Problem]:
    staleness, slots = job.spec.training.max_staleness, pool.spec.adapter_slots
    agents = sum(job.spec.pool_of(agent) == pool.metadata.name for agent in job.spec.pinned)
    needed = slots_needed(agents, staleness)
    if slots < needed:
        sum_ = f"{staleness} + 2" if agents == 1 else f"{agents} agents x ({staleness} + 2)"
        yield Problem(
            ("spec", "training", "maxStaleness"),
            f"maxStaleness {staleness} needs {sum_} = {needed} adapter slots, and adapterSlots of "
            f"{_named(job, pool)} is {slots}; lower maxStaleness or raise the pool's adapterSlots",
        )


def _length(job: RLJob, pool: ModelPool) -> Iterator[Problem]:
    tokens, longest = job.spec.rollout.max_tokens, pool.spec.rollout.max_model_len
    if tokens >= longest and job.spec.agents_on(pool.metadata.name):
        yield Problem(
            ("spec", "rollout", "maxTokens"),
            f"maxTokens {tokens} leaves no room for a prompt within maxModelLen {longest} of {_named(job, pool)}; "
            "lower maxTokens or raise the pool's maxModelLen",
        )
    for at, suite in enumerate(job.spec.evaluation.suites):
        if suite.max_tokens is not None and suite.max_tokens >= longest and job.spec.agents_on(pool.metadata.name):
            yield Problem(
                ("spec", "evaluation", "suites", at, "maxTokens"),
                f"maxTokens {suite.max_tokens} leaves no room for a prompt within maxModelLen {longest} of {_named(job, pool)}; "
                "lower maxTokens or raise the pool's maxModelLen",
            )


def _targets(job: RLJob, pool: ModelPool) -> Iterator[Problem]:
    if pool.spec.model.builtin is None:
        return
    for at, agent in job.spec.agents_on(pool.metadata.name):
        for position, target in enumerate(agent.adapter.targets):
            if target not in LINEAR_LAYERS:
                yield Problem(
                    ("spec", "agents", at, "adapter", "targets", position),
                    f"the builtin models have {listed(LINEAR_LAYERS)}, found '{target}'"
                    f"{did_you_mean(target, LINEAR_LAYERS)}",
                )


def _memory(job: RLJob, pool: ModelPool) -> Iterator[Problem]:
    wanted, largest = job.spec.environment.memory, pool.spec.sandbox.max_memory
    is_ours = pool.metadata.name == job.spec.pool_ref.name
    if is_ours and largest is not None and quantity(wanted) > quantity(largest):
        yield Problem(
            ("spec", "environment", "memory"),
            f"memory {wanted} is above sandbox.maxMemory {largest} of {_named(job, pool)}; lower the memory or raise the pool's",
        )


def _context(job: RLJob, pool: ModelPool) -> Iterator[Problem]:
    turns, tokens, longest = job.spec.rollout.max_turns, job.spec.rollout.max_tokens, pool.spec.rollout.max_model_len
    if turns * tokens > longest > tokens and job.spec.agents_on(pool.metadata.name):
        yield Problem(
            ("spec", "rollout", "maxTurns"),
            f"maxTurns {turns} x maxTokens {tokens} = {turns * tokens} tokens do not fit into maxModelLen {longest} of "
            f"{_named(job, pool)}: longer episodes end when the context is full, and are scored",
        )


def _named(job: RLJob, pool: ModelPool) -> str:
    return pool_text(job, pool.metadata.name)


def pool_text(job: RLJob, pool: str) -> str:
    """Return one of the job's pools for a message; a pool other than the job's own with the agents that name it."""
    agents = [f"'{agent.name}'" for _, agent in job.spec.agents_on(pool)] if pool != job.spec.pool_ref.name else []
    whose = f" of agent{'s' if len(agents) > 1 else ''} {listed(agents)}" if agents else ""
    return f"ModelPool '{pool}'{whose}"


def _is_power_of_two(number: float) -> bool:
    mantissa, _ = math.frexp(number)
    return mantissa == 0.5
