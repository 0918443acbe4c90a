"""One-line summaries of objects, for people."""

from marlaas_api.kinds import EnvironmentSpec, Kind, ModelPool, ModelSpec, RLJob, Tenant
from marlaas_api.kinds.fields import listed


def summary(one: Kind) -> str:
    """Return one line about the object's spec, without its name."""
    match one:
        case ModelPool():
            return _pool(one)
        case Tenant():
            return f"weight {one.spec.weight:g} for {_counted(len(one.spec.namespaces), 'namespace')}"
        case RLJob():
            return _job(one)
    return ""


def _pool(pool: ModelPool) -> str:
    spec = pool.spec
    workers = f"{_counted(spec.rollout.replicas, 'engine')}, {_counted(spec.trainer.replicas, 'trainer')}"
    return (
        f"{_model(spec.model)}; {workers}; {_counted(spec.adapter_slots, 'adapter slot')} of rank up to {spec.max_rank}"
    )


def _model(model: ModelSpec) -> str:
    if model.hub is not None:
        return f"{model.hub.id} at {model.hub.revision}"
    if model.pvc is not None:
        return f"{model.pvc.path} on volume {model.pvc.claim_name}"
    return model.builtin or str(model.path)


def _job(job: RLJob) -> str:
    training, rollout = job.spec.training, job.spec.rollout
    pools = [name for name in job.spec.pools if job.spec.agents_on(name)]
    episodes = f"{training.groups_per_step} x {rollout.group_size} episodes"
    if training.algorithm == "sft":
        episodes = _counted(training.groups_per_step, "demonstration")
    given = (agent.init_from.sft for agent in job.spec.agents if agent.init_from is not None)
    first = [f"the first {_counted(sft.steps, 'step')} of {sft.rows_per_step} demonstrations" for sft in given if sft]
    return (
        f"{training.algorithm}, {_counted(training.steps, 'step')} of {episodes} of {_environment(job.spec.environment)} "
        f"on {'pools' if len(pools) > 1 else 'pool'} {', '.join([listed(pools), *first])}"
    )


def _environment(environment: EnvironmentSpec) -> str:
    return str(environment.name or environment.image)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
