"""The jobs that the loop plays: small ones, teams, and the examples with few steps."""

import hashlib
from pathlib import Path
from typing import Any

import yaml
from tests.harness import changed, job_document

from marlaas_api.messages.agent_settings import InitSettings, NameRef, PolicySettings, SftSettings
from marlaas_api.messages.packed import PackedArgs
from marlaas_api.messages.training_settings import BaselineSettings

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
TEAM = ("solver", "verifier")
SUITES = [{"name": "greedy", "tasks": 1, "temperature": 0}, {"name": "twice", "tasks": 1, "samples": 2, "maxTokens": 3}]
UNRULY = ("steady", "faulty", "silent", "flood")


def document(name="reverse", *, seed=7, environment="reverse", tokens=16, **training: object):
    """A small strict job on the pool `tiny`. tokens: of a reply, at most; the tasks of `teams` need few."""
    settings = {"steps": 2, "groupsPerStep": 2, "maxStaleness": 0, "microbatchTokens": 512, "maxRefill": 2} | training
    spec = {
        "environment": {"name": environment, "concurrency": 8},
        "rollout": {"groupSize": 4, "maxTokens": tokens, "maxTurns": 4},
        "training": settings | {"optimizer": {"learningRate": 1e-3}},
        "evaluation": {"every": 100, "suites": SUITES},
    }
    uid = hashlib.sha256(f"{name}{seed}".encode()).hexdigest()[:12]
    return job_document(name, uid=uid, seed=seed, spec=spec)


def named(name, job, **spec: object):
    """The job under another name, with other values in its spec. Its seed stays, so it draws the same."""
    uid = hashlib.sha256(name.encode()).hexdigest()[:12]
    return job.model_copy(update={"job": name, "uid": uid, "spec": job.spec.model_copy(update=spec)})


def team(environment="teams:at_once", **training: object):
    job = document("team", environment=environment, tokens=4, maxRefill=0, **training)
    (agent,) = job.spec.agents
    agents = tuple(agent.model_copy(update={"name": name}) for name in TEAM)
    return named("team", job, agents=agents, rollout=job.spec.rollout.model_copy(update={"group_size": 2}))


def alone(speaker):
    job = team()
    agents = tuple(one.model_copy(update={"trainable": one.name == speaker}) for one in job.spec.agents)
    changes = {"name": "teams:Alone", "args": PackedArgs({"speaker": speaker})}
    environment = job.spec.environment.model_copy(update=changes)
    return named(f"only-{speaker}", job, agents=agents, environment=environment)


def on_two_pools(pool):
    job = team()
    first, second = job.spec.agents
    agents = first, second.model_copy(update={"pool_ref": NameRef(name=pool)})
    return named("bases", job, agents=agents, rollout=job.spec.rollout.model_copy(update={"max_turns": 8}))


def self_play():
    """One policy plays two roles against one of its past versions, all three at the same time.

    A group has one member. The baseline of each role is the running mean of its rewards.
    """
    job = document("self", tokens=4, environment="teams:at_once", maxRefill=0, steps=3)
    (policy,) = job.spec.agents
    second = policy.model_copy(update={"name": "second", "policy": PolicySettings(of="policy")})
    past = PolicySettings(of="policy", versions="past", window=1)
    opponent = policy.model_copy(update={"name": "opponent", "policy": past, "trainable": False})
    training = job.spec.training.model_copy(update={"baseline": BaselineSettings(type="running-mean", decay=0.5)})
    rollout = job.spec.rollout.model_copy(update={"group_size": 1})
    return named("self", job, agents=(policy, second, opponent), training=training, rollout=rollout)


def judged(judge):
    job = document("judged", tokens=4, environment="teams:once", maxRefill=0)
    (learner,) = job.spec.agents
    frozen = {"name": "judge", "trainable": False, "init_from": InitSettings(path=str(judge))}
    return named("judged", job, agents=(learner.model_copy(update=frozen), learner))


def distilled(judge, pool):
    """A job whose policy imitates the judge's adapter on another pool. Groups of one episode are enough."""
    distillation = {"algorithm": "distill", "distillation": {"teacher": "teacher"}}
    job = document("distilled", steps=3, **distillation)
    (policy,) = job.spec.agents
    teacher = {"name": "teacher", "trainable": False, "init_from": InitSettings(path=str(judge))}
    agents = policy, policy.model_copy(update={**teacher, "pool_ref": NameRef(name=pool)})
    return named("distilled", job, agents=agents, rollout=job.spec.rollout.model_copy(update={"group_size": 1}))


def taught():
    """A job whose first two steps train demonstrations of three rows each; the sampled steps after them have a KL reference."""
    data = {"source": {"files": str(EXAMPLES.parent / "reversals.jsonl")}, "completion": "{{ reversed }}"}
    data["prompt"] = [{"role": "user", "content": "reverse: {{ word }}"}]
    job = document("taught", steps=4, kl={"coefficient": 0.1})
    (policy,) = job.spec.agents
    sft = SftSettings(data=PackedArgs(data), steps=2, rows_per_step=3)
    return named("taught", job, agents=(policy.model_copy(update={"init_from": InitSettings(sft=sft)}),))


def candidates():
    job = document("choose", tokens=4, environment="teams:choose", maxRefill=0)
    return changed(job, rollout=job.spec.rollout.model_copy(update={"max_turns": 5}))


def again():
    """Four tasks that come again, and rest when they are solved or hopeless."""
    data = {"tasks": 4, "order": "shuffled", "skip": {"passes": 1, "maxShare": 0.6}}
    several = {"updatesPerStep": 2, "epochs": 2}
    return document("again", environment="calculator", steps=4, maxRefill=1, data=data, **several)


def unruly(name, max_fault_share):
    """A job of four agents. Every second task ends in a fault."""
    job = document(name, environment="teams:unruly", tokens=4, maxRefill=8)
    (agent,) = job.spec.agents
    agents = tuple(agent.model_copy(update={"name": one}) for one in UNRULY)
    limits = {"max_attempts": 2, "max_fault_share": max_fault_share}
    environment = job.spec.environment.model_copy(update=limits)
    return changed(
        job, agents=agents, environment=environment, rollout=job.spec.rollout.model_copy(update={"group_size": 2})
    )


# examples ------------------------------------------------------------------------------------------------------------


def example(name, steps, tasks, **training: object):
    """The spec of examples/agents/NAME.yaml on the pool `tiny` with few steps and held-out tasks."""
    manifests = list(yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text()))
    spec: dict[str, Any] = {key: value for key, value in manifests[-1]["spec"].items() if key != "poolRef"}
    spec["training"] |= {"steps": steps} | training
    spec["evaluation"] |= {"tasks": tasks, "every": steps}
    return spec


def examples():
    """The examples of teams, with adapters and replies that fit the tiny model."""
    relay = example("relay", 2, 2, groupsPerStep=2, maxRefill=0, maxStaleness=0)
    solving = example("solver-verifier", 2, 4, groupsPerStep=2, maxRefill=0)
    for agent, rank in zip(solving["agents"], (1, 8), strict=True):
        agent["adapter"] = {"rank": rank}
    solving["rollout"] = {"groupSize": 2, "maxTokens": 8, "maxTurns": 1}
    kuhn = example("kuhn-poker", 3, 6, groupsPerStep=6)
    marks = example("tic-tac-toe", 2, 2, groupsPerStep=4)
    marks["agents"][0]["adapter"]["rank"] = 8
    for spec in (relay, kuhn, marks):
        spec["rollout"]["groupSize"] = 4
    specs = {"relay": relay, "solver-verifier": solving, "kuhn-poker": kuhn, "tic-tac-toe": marks}
    return [job_document(name, uid=f"uid-{name}", seed=7, spec=spec) for name, spec in specs.items()]
