"""Runs of examples/agents/tic-tac-toe.yaml, and of the same without past opponents: exact results by step, table and curves."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.runs import Run, finished, kept, run
from bench.tic_tac_toe import Opponent, Policy, Results, boards, perfect, results, uniform
from marlaas.envs.tic_tac_toe import EMPTY, MARKS, prompt
from marlaas.plots.style import INK, RULE, blank, of_run, plain

EXAMPLE = "agents/tic-tac-toe.yaml"
EVERY = 10
"""Steps between two versions whose results are computed."""
OPPONENTS: Mapping[str, Opponent] = {"random": uniform, "perfect": perfect}
VARIANTS = {"past": "with past opponents", "self": "newest version only"}
HEADERS = [
    "opponents in training",
    "seed",
    "steps",
    "against",
    "before",
    "after: value",
    "won",
    "drawn",
    "lost",
    "illegal",
]


def variant(manifests: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return the example, or the same job without the agent `past`."""
    pool, job = copy.deepcopy(manifests)
    if name == "self":
        spec = job["spec"]
        spec["agents"] = [agent for agent in spec["agents"] if agent["name"] != "past"]
        del spec["environment"]["args"]
    return [pool, job]


def train(manifests: list[dict[str, Any]], name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Return the exact results of a run by opponent and step: each is the mean of both marks."""
    wanted = variant(manifests, name)

    def new() -> dict[str, Any]:
        result = finished(run(wanted, seed=seed))
        return {"seconds": result.wall_s, "results": results_of(result, wanted[0]["spec"]["model"]["builtin"])}

    return kept(folder / f"tic-tac-toe-{name}-{seed}.json", wanted, new)


def results_of(result: Run, model: str) -> dict[str, list[list[float]]]:
    """Return, by opponent, rows of step, won, drawn, lost and illegal."""
    from bench.policy_reader import PolicyReader, files_of, versions_of  # it imports torch
    from marlaas.models import prepare

    reader, versions = PolicyReader(prepare(model)), versions_of(result, MARKS[0])
    chosen = [one for one in versions if one[0] % EVERY == 0 or one is versions[-1]]
    found: dict[str, list[list[float]]] = {name: [] for name in OPPONENTS}
    for step, adapter in chosen:
        policy = policy_of(reader, files_of(result.folder, adapter))
        for name, opponent in OPPONENTS.items():
            both = both_marks(policy, opponent)
            found[name].append([step, both.won, both.drawn, both.lost, both.illegal])
    return found


def policy_of(reader: Any, files: Mapping[str, bytes]) -> Policy:
    """Return the probabilities of the numbers of cells on every board. reader: a `PolicyReader`."""
    every, cells = boards(), list(EMPTY)
    tokens = [reader.texts.index(cell) for cell in cells]
    rows = reader.first_tokens(files, [prompt(board) for board in every])[:, tokens].tolist()
    return {board: dict(zip(cells, row, strict=True)) for board, row in zip(every, rows, strict=True)}


def both_marks(policy: Policy, opponent: Opponent) -> Results:
    """Return the mean results of a policy that plays `x` and of one that plays `o`."""
    return Results().plus(0.5, results(policy, "x", opponent)).plus(0.5, results(policy, "o", opponent))


def random_player() -> Policy:
    """Return the policy that chooses evenly among free cells."""
    return {board: uniform(board) for board in boards()}


def random_rows() -> list[list[Any]]:
    """Return the rows of the table for a random player."""
    found = [(name, both_marks(random_player(), opponent)) for name, opponent in OPPONENTS.items()]
    ends = [(name, [one.value, one.won, one.drawn, one.lost, abs(one.illegal)]) for name, one in found]
    return [["(a random player)", "", "", name, "", *(f"{one:.3f}" for one in numbers)] for name, numbers in ends]


def rows(name: str, seed: int, found: dict[str, Any]) -> list[list[Any]]:
    """Return the rows of the table, one for each opponent."""
    made = []
    for against, by_step in found["results"].items():
        before, after = (Results(*by_step[at][1:]) for at in (0, -1))
        numbers = [before.value, after.value, after.won, after.drawn, after.lost, after.illegal]
        made.append([VARIANTS[name], seed, int(by_step[-1][0]), against, *(f"{one:.3f}" for one in numbers)])
    return made


def draw(trained: Mapping[tuple[str, int], dict[str, Any]], path: Path) -> None:
    """Draw the value against each opponent by step: a colour for each variant, dashed lines for the perfect player.

    Thin lines: the values of a random player.
    """
    figure = blank(6.4, 3.2)
    axes = figure.subplots()
    for number, ((name, seed), found) in enumerate(trained.items()):
        colour, _ = of_run(number)
        for against, style in zip(OPPONENTS, ("-", "--"), strict=True):
            by_step = found["results"][against]
            values = [Results(*row[1:]).value for row in by_step]
            label = f"{VARIANTS[name]}, seed {seed}, against {against}"
            axes.plot([row[0] for row in by_step], values, style, color=colour, linewidth=1.5, label=label)
    for opponent, style in zip(OPPONENTS.values(), ("-", "--"), strict=True):
        axes.axhline(both_marks(random_player(), opponent).value, color=RULE, linestyle=style, linewidth=1)
    axes.set_xlabel("step", fontsize=9, color=INK)
    axes.set_ylabel("mean reward", fontsize=9, color=INK)
    axes.legend(frameon=False, loc="center right", fontsize=7)
    plain(axes)
    figure.savefig(path, format="png", dpi=100)
