"""Agents in one job: the relay, its adapters with the agents swapped, Kuhn poker, tic-tac-toe, and a solver with its verifier.

relay: `marlaas run` of the example; the team's mean reward on the held-out tasks before and after training. When all
seeds are complete, draws docs/images/agents.png: reward of the team in training, and the evaluations.

swapped: the trained adapters are evaluated again on the same held-out tasks, in two jobs of one run. In `same`, each
agent begins with its own adapter, which must repeat the relay's last evaluation within sampling noise. In `swapped`, each
begins with the other's. A job without a trainable agent is refused, so the first agent is trainable, for one step, and
the evaluation of version 0 is read.

kuhn: `marlaas run` of examples/agents/kuhn-poker.yaml; exact NashConv, before training, of the last versions, and of the
reach-weighted average policy over the last half of the steps (bench/kuhn.py). All versions' policies are computed from their
adapters, so no number depends on sampled games or on a choice of versions. Draws docs/images/kuhn.png.

tictactoe: `marlaas run` of examples/agents/tic-tac-toe.yaml with the first seed, and of the same job without past opponents;
exact results against a random and a perfect player, before training and after every tenth step. Draws docs/images/tic-tac-toe.png.

branch: see bench/choices.py.

demand, balance, pipeline: several agents with simulated stage times; see bench/agent_stages.py.

verifier: see bench/solver_verifier.py.

digests: see bench/agent_digests.py.

Each run's results and adapters are kept under --out, and a run whose results exist is not repeated with the same sources.
"""

import argparse
import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import agent_digests, agent_stages, choices, kuhn_runs, options, solver_verifier, tic_tac_toe_runs
from bench.runs import changed, finished, kept, run, table
from bench.sources import ROOT
from marlaas.plots.style import INK, blank, of_run, plain

PICTURES = ROOT / "docs" / "images"
KEPT = ROOT / "runs" / "agents"
START, MUST, AIM, SWAPPED = 0.35, 0.85, 0.95, 0.45
PARTS = ("relay", "swapped", "kuhn", "tictactoe", "branch", "demand", "balance", "pipeline", "verifier", "digests")
EXAMPLE, STAGE_STEPS = "agents/relay.yaml", 12
HEADERS = {
    "relay": ["seed", "steps", "before", "after", "called", "computed", "seconds", f"≤ {START} → ≥ {MUST}"],
    "swapped": ["seed", "after training", "evaluated again", "swapped", f"≤ {SWAPPED}"],
}


def swapped(manifests: Sequence[dict[str, Any]], adapters: Path) -> list[dict[str, Any]]:
    """Return the pool and two jobs that evaluate the adapters: `same`, and `swapped`, each agent with the next one's.

    adapters: a folder with a PEFT folder of each agent.
    """
    pool, trained = manifests
    names = [agent["name"] for agent in trained["spec"]["agents"]]
    jobs = [_evaluation(trained, "same", dict(zip(names, names, strict=True)), adapters)]
    others = dict(zip(names, [*names[1:], names[0]], strict=True))
    return [pool, *jobs, _evaluation(trained, "swapped", others, adapters)]


def train(manifests: list[dict[str, Any]], seed: int, folder: Path) -> dict[str, Any]:
    """Return the results of the relay's run; its adapters are copied to the folder of `adapters_of`."""

    def new() -> dict[str, Any]:
        result = finished(run(manifests, seed=seed))
        (name,), adapters = result.jobs(), adapters_of(folder, seed)
        shutil.rmtree(adapters, ignore_errors=True)
        shutil.copytree(result.folder / name / "adapter", adapters)
        evals = result.evals[name]
        return {
            "steps": len(result.records[name]),
            "seconds": result.wall_s,
            "evals": [[one["step"], one["reward_mean"]] for one in evals],
            "metrics": evals[-1]["metrics"],
            # A step's own mean counts an episode once for each agent that spoke in it. The caller speaks in all.
            "rewards": [one["agents"]["caller"]["reward_mean"] for one in result.records[name]],
        }

    return kept(folder / f"relay-{seed}.json", manifests, new)


def evaluate(manifests: list[dict[str, Any]], trained: dict[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    """Return the evaluations of version 0 of the jobs `same` and `swapped`."""
    wanted = swapped(manifests, adapters_of(folder, seed))

    def new() -> dict[str, Any]:
        jobs = finished(run(wanted, seed=seed)).jobs()
        return {name.rpartition("/")[2]: job["evalBefore"] for name, job in jobs.items()}

    return kept(folder / f"swapped-{seed}.json", [*wanted, trained], new)


def adapters_of(folder: Path, seed: int) -> Path:
    return folder.absolute() / f"adapters-{seed}"


def relay_row(seed: int, found: dict[str, Any]) -> list[Any]:
    before, after = found["evals"][0][1], found["evals"][-1][1]
    numbers = [before, after, found["metrics"]["called"], found["metrics"]["computed"]]
    told = "missed" if before > START or after < MUST else "met" if after < AIM else f"met, also {AIM}"
    return [seed, found["steps"], *(f"{number:.3f}" for number in numbers), f"{found['seconds']:.0f}", told]


def swapped_row(seed: int, trained: dict[str, Any], found: dict[str, Any]) -> list[Any]:
    numbers = [trained["evals"][-1][1], found["same"], found["swapped"]]
    return [seed, *(f"{number:.3f}" for number in numbers), "met" if found["swapped"] <= SWAPPED else "missed"]


def draw(trained: dict[int, dict[str, Any]], path: Path) -> None:
    """Draw a line of training rewards for each seed, with a dot for each evaluation."""
    figure = blank(6.4, 3.2)
    axes = figure.subplots()
    for number, (seed, found) in enumerate(trained.items()):
        colour, _ = of_run(number)
        axes.plot(range(1, len(found["rewards"]) + 1), found["rewards"], color=colour, linewidth=1.5, label=str(seed))
        axes.plot(*zip(*found["evals"], strict=True), "o", color=colour, markersize=5)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("step", fontsize=9, color=INK)
    axes.set_ylabel("reward of the team", fontsize=9, color=INK)
    axes.legend(title="seed", frameon=False, loc="lower right")
    plain(axes)
    figure.savefig(path, format="png", dpi=100)


def main(arguments: Sequence[str] = ()) -> None:
    chosen = _parser().parse_args(arguments)
    if {"relay", "swapped"} & set(chosen.only):
        _teams(chosen)
    if "kuhn" in chosen.only:
        _kuhn(chosen)
    if "tictactoe" in chosen.only:
        _tic_tac_toe(chosen)
    if "branch" in chosen.only:
        choices.measure(chosen.seeds, chosen.steps, chosen.rate, chosen.out, chosen.pictures / "choices.png")
    if "demand" in chosen.only:
        agent_stages.run_demand(chosen.rounds, STAGE_STEPS)
    if "balance" in chosen.only:
        agent_stages.run_balance(chosen.rounds, STAGE_STEPS)
    if "pipeline" in chosen.only:
        agent_stages.run_pipeline(chosen.rounds, STAGE_STEPS)
    if "verifier" in chosen.only:
        solver_verifier.measure(chosen.seeds[:2], chosen.steps, chosen.out, chosen.pictures / "solver-verifier.png")
    if "digests" in chosen.only:
        agent_digests.measure(chosen.seeds[:1], chosen.steps, chosen.out)


def _teams(chosen: argparse.Namespace) -> None:
    manifests = changed(EXAMPLE, chosen.steps, chosen.rate)
    trained = {}
    for seed in chosen.seeds:
        trained[seed] = train(manifests, seed, chosen.out)
        print(f"relay, seed {seed}: {' → '.join(f'{reward:.3f}' for _, reward in trained[seed]['evals'])}", flush=True)
    if "relay" in chosen.only:
        print("\n" + table(HEADERS["relay"], [relay_row(seed, found) for seed, found in trained.items()]) + "\n")
        draw(trained, chosen.pictures / "agents.png")
    if "swapped" in chosen.only:
        again = {seed: evaluate(manifests, found, seed, chosen.out) for seed, found in trained.items()}
        print(table(HEADERS["swapped"], [swapped_row(seed, trained[seed], found) for seed, found in again.items()]))


def _kuhn(chosen: argparse.Namespace) -> None:
    manifests = changed(kuhn_runs.EXAMPLE, chosen.steps, chosen.rate)
    trained = {seed: kuhn_runs.train(manifests, seed, chosen.out) for seed in chosen.seeds}
    print("\n" + table(kuhn_runs.HEADERS, [kuhn_runs.row(seed, found) for seed, found in trained.items()]))
    kuhn_runs.draw(trained, chosen.pictures / "kuhn.png")


def _tic_tac_toe(chosen: argparse.Namespace) -> None:
    manifests = changed(tic_tac_toe_runs.EXAMPLE, chosen.steps, chosen.rate)
    seed = chosen.seeds[0]
    trained = {
        (name, seed): tic_tac_toe_runs.train(manifests, name, seed, chosen.out) for name in tic_tac_toe_runs.VARIANTS
    }
    rows = [row for (name, _), found in trained.items() for row in tic_tac_toe_runs.rows(name, seed, found)]
    print("\n" + table(tic_tac_toe_runs.HEADERS, [*rows, *tic_tac_toe_runs.random_rows()]))
    tic_tac_toe_runs.draw(trained, chosen.pictures / "tic-tac-toe.png")


def _parser() -> argparse.ArgumentParser:
    parser = options("agents", __doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="swapped needs relay's adapters")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=3, help="of demand, balance, pipeline; default: %(default)s")
    parser.add_argument("--steps", type=int, help="default: the example's")
    parser.add_argument("--rate", type=float, help="learning rate; default: the example's")
    parser.add_argument("--out", type=Path, default=KEPT, help="folder for the results of runs; default: %(default)s")
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="folder of the pictures; default: %(default)s")
    return parser


def _evaluation(trained: dict[str, Any], name: str, source: dict[str, str], adapters: Path) -> dict[str, Any]:
    """Return a job of one step that evaluates. source: by agent, the agent whose adapter it begins with."""
    job = copy.deepcopy(trained)
    job["metadata"]["name"] = name
    for at, agent in enumerate(job["spec"]["agents"]):
        agent |= {"trainable": at == 0, "initFrom": {"path": str(adapters / source[agent["name"]])}}
    job["spec"]["rollout"]["groupSize"] = 2
    job["spec"]["training"] |= {"steps": 1, "groupsPerStep": 1, "maxRefill": 0, "optimizer": {"learningRate": 1e-12}}
    return job
