"""Checks of a job's agents, and of what their rewards are compared with, that concern several fields."""

from collections.abc import Iterator

from marlaas_api.kinds.agent import AgentSpec
from marlaas_api.kinds.fields import did_you_mean, listed
from marlaas_api.kinds.problems import Loc, Problem
from marlaas_api.kinds.rljob import RLJobSpec


def check_agents(spec: RLJobSpec) -> Iterator[Problem]:
    """Yield problems of a job's agents."""
    for at, agent in enumerate(spec.agents):
        yield from _training(spec, at, agent)
        yield from _policy(spec, at, agent)
        yield from _rewards(spec, at, agent)
    yield from _demonstrations(spec)
    yield from _teacher(spec)
    if (
        spec.training.algorithm not in ("sft", "distill")
        and spec.rollout.group_size < 2
        and spec.training.baseline.type == "group"
    ):
        text = (
            "groupSize 1 has nothing to compare a reward with; set at least 2, or training.baseline.type: running-mean"
        )
        yield Problem(("spec", "rollout", "groupSize"), text)
    if spec.training.baseline.type != "group" and spec.training.data.skip is not None:
        text = "skip needs rewards that are compared within a group; remove skip, or choose baseline type group"
        yield Problem(("spec", "training", "data", "skip"), text)
    if not any(agent.trainable for agent in spec.agents if agent.policy is None):
        yield Problem(
            ("spec", "agents", 0, "trainable"), "no agent of the job is trainable; set trainable: true for at least one"
        )


def _teacher(spec: RLJobSpec) -> Iterator[Problem]:
    """Yield problems of the teacher of `distill`."""
    if spec.training.distillation is None:
        return
    name, others = spec.training.distillation.teacher, {agent.name: agent for agent in spec.agents}
    loc: Loc = ("spec", "training", "distillation", "teacher")
    frozen = [agent.name for agent in spec.agents if not agent.trainable]
    instead = (
        f"name {listed(frozen)}"
        if frozen
        else "add an agent with trainable: false, whose initFrom is the teacher's adapter"
    )
    if name not in others:
        yield Problem(loc, f"the job has no agent '{name}'{did_you_mean(name, others) or f'; {instead}'}")
    elif others[name].trainable:
        yield Problem(
            loc, f"agent '{name}' is trainable, and a teacher does not change; set its trainable: false, or {instead}"
        )
    if spec.rollout.temperature != 1:
        text = f"distill compares student and teacher at temperature 1, and temperature is {spec.rollout.temperature:g}; remove it"
        yield Problem(("spec", "rollout", "temperature"), text)


def _demonstrations(spec: RLJobSpec) -> Iterator[Problem]:
    """Yield problems of supervised fine-tuning before the job's other steps."""
    given = [(at, agent, agent.init_from.sft) for at, agent in enumerate(spec.agents) if agent.init_from is not None]
    having = [(at, agent, sft) for at, agent, sft in given if sft is not None]
    for number, (at, agent, sft) in enumerate(having):
        loc: Loc = ("spec", "agents", at, "initFrom", "sft")
        if number:
            yield Problem(
                loc, f"agent '{having[0][1].name}' has sft already, and one agent of a job may have it; remove one"
            )
        if spec.training.algorithm == "sft":
            yield Problem(
                loc,
                "every step of the algorithm sft trains demonstrations, those of the environment; remove initFrom.sft",
            )
        if not agent.trainable:
            yield Problem(loc, f"agent '{agent.name}' is not trainable; remove sft, or trainable: false")
        if sft.steps > spec.training.steps > 0:
            text = f"{sft.steps} steps of demonstrations, and training.steps is {spec.training.steps}, which counts them; raise training.steps"
            yield Problem((*loc, "steps"), text)


def _training(spec: RLJobSpec, at: int, agent: AgentSpec) -> Iterator[Problem]:
    if agent.training is None:
        return
    if not agent.trainable:
        yield Problem(
            ("spec", "agents", at, "training"),
            f"agent '{agent.name}' is not trainable; remove training, or trainable: false",
        )
    own = agent.training.optimizer
    floor = None if own is None else own.min_learning_rate_ratio  # one of the job's has no effect without decay
    if own is not None and floor is not None and (own.schedule or spec.training.optimizer.schedule) == "constant":
        yield Problem(
            ("spec", "agents", at, "training", "optimizer"),
            f"minLearningRateRatio {floor:g} needs schedule linear or cosine, because constant does not decay: remove it, or choose another schedule",
        )


def _policy(spec: RLJobSpec, at: int, agent: AgentSpec) -> Iterator[Problem]:
    """Yield problems of an agent that plays another one's policy."""
    if agent.policy is None:
        return
    wanted = agent.policy.of
    loc: Loc = ("spec", "agents", at, "policy", "of")
    others = {one.name: one for one in spec.agents if one.name != agent.name}
    having = [name for name, one in others.items() if one.policy is None]
    instead = f"name an agent that has one: {listed(having)}" if having else "remove policy"
    if wanted == agent.name:
        yield Problem(loc, f"agent '{agent.name}' names itself; {instead}")
    elif wanted not in others:
        yield Problem(loc, f"the job has no agent '{wanted}'{did_you_mean(wanted, others) or f'; {instead}'}")
    elif others[wanted].policy is not None:
        yield Problem(loc, f"agent '{wanted}' has no policy of its own; {instead}")
    elif agent.policy.versions == "past" and not others[wanted].trainable:
        text = f"agent '{wanted}' is not trainable, so it has no past versions; remove versions: past"
        yield Problem((*loc[:-1], "versions"), text)


def _rewards(spec: RLJobSpec, at: int, agent: AgentSpec) -> Iterator[Problem]:
    """Yield the agents that a reward is to be taken from and that the job lacks."""
    names = [one.name for one in spec.agents]
    for position, part in enumerate(agent.reward_from):
        if part.agent not in names:
            text = f"the job has no agent '{part.agent}'{did_you_mean(part.agent, names) or f'; its agents are {listed(names)}'}"
            yield Problem(("spec", "agents", at, "rewardFrom", position, "agent"), text)
