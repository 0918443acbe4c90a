"""Workloads and modes of `bench multitenant`, as manifests."""

import copy
from dataclasses import dataclass
from typing import Any

from bench.runs import documents

NUM_TENANTS = 4
SIGMA = 0.5
GROUP_SIZE, GROUPS_PER_STEP = 4, 2
_KV_BYTES = "256Mi"


@dataclass(frozen=True, slots=True, order=True)
class Workload:
    """Jobs that all modes run with the same seed.

    wait_s: median waiting time of the tool; above 0 it is log-normal with SIGMA.
    weights: of the tenants. max_seqs: sequences that the engine decodes at once; None: the pool's default.
    """

    num_jobs: int
    wait_s: float
    steps: int
    seed: int = 0
    weights: tuple[float, ...] = (1.0,) * NUM_TENANTS
    max_seqs: int | None = None

    def __str__(self) -> str:
        weights = "" if len(set(self.weights)) == 1 else f"-weights{'-'.join(f'{one:g}' for one in self.weights)}"
        limit = f"-{self.max_seqs}seqs" if self.max_seqs else ""
        return f"{self.num_jobs}x{self.steps}-{self.wait_s:g}s-seed{self.seed}{weights}{limit}"


@dataclass(frozen=True, slots=True, order=True)
class Mode:
    """How the jobs run.

    letter: of the issue and the report. strict: maxStaleness 0, else 1. together: all at once, else one after another.
    before: in the worktree of the commit before. changes: of `bench.changed_run`. evals: held-out tasks.
    """

    letter: str
    strict: bool
    together: bool
    before: bool = False
    changes: tuple[str, ...] = ()
    evals: int = 0

    def __str__(self) -> str:
        return f"{self.letter}-{'strict' if self.strict else 'async'}"


MODES = (
    Mode("A", strict=True, together=False),
    Mode("B", strict=False, together=False),
    Mode("C", strict=True, together=True, changes=("lockstep",)),
    Mode("D", strict=True, together=True),
    Mode("D", strict=False, together=True),
    Mode("O", strict=True, together=False, before=True),
    Mode("O", strict=True, together=True, before=True),
)


def name_of(mode: Mode) -> str:
    """Return the mode's name in reports and folders."""
    if mode.before:
        return f"{mode}-{'together' if mode.together else 'one-by-one'}"
    return str(mode)


def manifests(workload: Workload, mode: Mode, slots: int) -> list[dict[str, Any]]:
    """Return the pool, the tenants and the jobs.

    One after another: with the slots of one job, so that the next job is admitted when one has ended.
    """
    staleness = 0 if mode.strict else 1
    pool, *_, example = documents("quickstart.yaml")
    pool["spec"] |= {"adapterSlots": slots if mode.together else staleness + 2}
    pool["spec"]["rollout"] |= {"kvCacheBytes": _KV_BYTES}
    if workload.max_seqs:
        pool["spec"]["rollout"]["maxNumSeqs"] = workload.max_seqs
    if not mode.together and not mode.before:
        pool["spec"]["rollout"]["agentsPerSlot"] = 1
    jobs = [_job(example, workload, number, staleness, mode.evals) for number in range(workload.num_jobs)]
    return [pool, *_tenants(workload, mode), *jobs]


def namespace(number: int) -> str:
    """Return the namespace of a job; every tenant has one."""
    return f"team-{number % NUM_TENANTS}"


def _tenants(workload: Workload, mode: Mode) -> list[dict[str, Any]]:
    head = {"apiVersion": "marlaas.dev/v1alpha1", "kind": "Tenant"}
    if mode.together or mode.before:
        return [
            {
                **head,
                "metadata": {"name": namespace(number)},
                "spec": {"namespaces": [namespace(number)], "weight": weight},
            }
            for number, weight in enumerate(workload.weights)
        ]
    spec = {"namespaces": [namespace(number) for number in range(NUM_TENANTS)], "quota": {"jobs": 1}}
    return [{**head, "metadata": {"name": "all"}, "spec": spec}]


def _job(example: dict[str, Any], workload: Workload, number: int, staleness: int, evals: int) -> dict[str, Any]:
    job = copy.deepcopy(example)
    spec = job["spec"]
    job["metadata"] = {"name": f"job-{number:02}", "namespace": namespace(number)}
    args = {"median_s": workload.wait_s, "sigma": SIGMA} if workload.wait_s else {}
    spec["environment"] = {"name": "multitenant_env:calculator", "args": args}
    spec["rollout"] = {"groupSize": GROUP_SIZE, "maxTurns": 3, "maxTokens": 32}
    spec["training"] |= {
        "steps": workload.steps,
        "groupsPerStep": GROUPS_PER_STEP,
        "maxRefill": 0,
        "maxStaleness": staleness,
        "seed": 1000 * workload.seed + number,
    }
    spec["evaluation"] = {"every": workload.steps, "tasks": evals}
    return job
