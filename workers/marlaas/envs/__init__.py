"""Builtin environments by name, and how any environment is loaded (`loading`) and played (`playing`)."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

DATASET = "dataset"
BUILTINS = {
    "calculator": "marlaas.envs.tiny_tasks:Calculator",
    DATASET: "marlaas.envs.dataset.environment:Dataset",
    "guess-number": "marlaas.envs.guess_number:GuessNumber",
    "kuhn-poker": "marlaas.envs.kuhn_poker:KuhnPoker",
    "python-tool": "marlaas.envs.python_tool:PythonTool",
    "reasoning-gym": "marlaas.envs.reasoning:ReasoningGym",
    "relay": "marlaas.envs.team_tasks:Relay",
    "reverse": "marlaas.envs.tiny_tasks:Reverse",
    "solver-verifier": "marlaas.envs.solver_verifier:SolverVerifier",
    "tic-tac-toe": "marlaas.envs.tic_tac_toe:TicTacToe",
}


def suite_args(name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a suite's own environment: all rows of a data set are held out, unless the arguments say which."""
    is_undivided = name == DATASET and args.get("held_out") is None
    return {**args, "held_out": {"share": 1}} if is_undivided else dict(args)


def data_digest(digests: Iterable[str]) -> str:
    """Return the digest of several: the only one as it is, else the SHA-256 of their lines; empty ones do not count.

    `sha256sum FILE… | cut -d' ' -f1 | sha256sum` prints it for several files.
    """
    known = [one for one in digests if one]
    if len(known) < 2:
        return "".join(known)
    return hashlib.sha256("".join(f"{one}\n" for one in known).encode()).hexdigest()


def own_modules(name: str, args: Mapping[str, Any]) -> list[str]:
    """Return the modules beside the manifest that an environment needs: its own, or those of the builtin `dataset`'s rewards."""
    if name != DATASET:
        return [name.partition(":")[0]] if ":" in name else []
    rewards = args.get("rewards")
    parts = [one for one in rewards if isinstance(one, Mapping)] if isinstance(rewards, list) else []
    named = [one.get(kind) for one in parts for kind in ("python", "group")]
    return [one.partition(":")[0] for one in named if isinstance(one, str)]
