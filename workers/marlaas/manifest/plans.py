"""Plan the memory of pools whose models are on this machine, and find the pools that do not fit their cards."""

from collections.abc import Iterator, Mapping, Sequence

from marlaas.manifest.crosscheck import ManifestObjects
from marlaas.manifest.findings import Finding, Placed
from marlaas.models import ModelFacts
from marlaas.models.cards import Card
from marlaas.models.memory import PoolUse
from marlaas.models.memory_plan import PoolPlan, card_shortage, plan_on_card, plan_on_cpu
from marlaas_api.documents import job_spec
from marlaas_api.kinds import ModelPool
from marlaas_api.kinds.problems import Problem
from marlaas_api.messages import JobSpec

Known = Sequence[tuple[Placed[ModelPool], ModelFacts]]


def memory_plans(contents: ManifestObjects, known: Known, *, on_gpu: bool, card: int | None) -> dict[str, PoolPlan]:
    """Return the plan of each known pool by name.

    Args:
        on_gpu: whether `marlaas run` would use a GPU here; pools with `gpus` use one in a cluster.
        card: bytes of a card, on which all pools are planned; None if it is not known.
    """
    plans = {}
    for pool, facts in known:
        spec, users = pool.object.spec, users_of(contents, pool.object)
        is_on_card = card is not None or on_gpu or spec.rollout.gpus > 0 or spec.trainer.gpus > 0
        plan = plan_on_card(facts, spec, users, card) if is_on_card else plan_on_cpu(facts, spec, users)
        plans[pool.object.metadata.name] = plan
    return plans


def refused(known: Known, plans: Mapping[str, PoolPlan]) -> Iterator[Finding]:
    """Yield the workers that do not fit a card."""
    for pool, _ in known:
        plan = plans[pool.object.metadata.name]
        for role, text in plan.refusals() if plan.shared is not None else ():
            yield pool.source.finding(Problem(("spec", role), text))


def too_big_for(contents: ManifestObjects, known: Known, found: Sequence[Card], when: str = "") -> Iterator[Finding]:
    """Yield a finding if the workers of all pools together exceed this machine's cards, placed at the first pool."""
    uses = [PoolUse(facts, pool.object.spec, users_of(contents, pool.object)) for pool, facts in known]
    text = card_shortage([card.total for card in found], uses) if found and uses else None
    if text is not None:
        yield known[0][0].source.finding(Problem(("spec", "model"), f"{text}{when}"))


def users_of(contents: ManifestObjects, pool: ModelPool) -> list[JobSpec]:
    """Return the specs of the jobs with agents on a pool, each with these agents only."""
    specs = [job.object.spec for job in contents.jobs]
    agents = [(spec, [agent for _, agent in spec.agents_on(pool.metadata.name)]) for spec in specs]
    return [job_spec(spec.model_copy(update={"agents": tuple(here)})) for spec, here in agents if here]
