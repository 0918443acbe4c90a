"""Kuhn poker's policies of all versions of a run, computed from the adapters that the run has kept: nothing is sampled."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from bench.kuhn import SETS
from bench.policy_reader import PolicyReader, files_of, versions_of
from bench.runs import Run
from marlaas.envs.kuhn_poker import BET, PLAYERS, move_of, prompt
from marlaas.models import prepare


class Reader:
    """Computes the probability of a bet at information sets, at temperature 1."""

    def __init__(self, model: Path) -> None:
        self._reader = PolicyReader(model)
        self._bets = torch.tensor([move_of(text) == BET for text in self._reader.texts])

    def policy(self, adapter: Path | Mapping[str, bytes], known: Sequence[str]) -> dict[str, float]:
        """Return the probability that the first character of a reply is a bet's, by information set.

        Args:
            adapter: a PEFT folder, or its files by name.
        """
        found = self._reader.first_tokens(adapter, [prompt(one) for one in known])
        return dict(zip(known, found[:, self._bets].sum(-1).tolist(), strict=True))


def policies_of(run: Run, model: str) -> dict[str, list[dict[str, float]]]:
    """Return each agent's policy before training and after each step.

    Args:
        model: name of the builtin base model.
    """
    reader, found = Reader(prepare(model)), {}
    for player, agent in enumerate(PLAYERS):
        versions = [adapter for _, adapter in versions_of(run, agent)]
        read = {one: reader.policy(files_of(run.folder, one), SETS[player]) for one in set(versions)}
        found[agent] = [read[one] for one in versions]
    return found
