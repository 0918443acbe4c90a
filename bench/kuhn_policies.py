"""Kuhn poker's policies of all versions of a run, computed from the adapters that the run has kept: nothing is sampled."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call

from bench.kuhn import SETS
from bench.runs import Run
from marlaas.envs.kuhn_poker import BET, PLAYERS, move_of, prompt
from marlaas.local.folder import OutFolder
from marlaas.models import prepare
from marlaas_api.messages import ChatMessage
from marlaas_api.names import AdapterRef
from marlaas_worker.adapters import CONFIG_FILE, TENSORS_FILE, Tensors, parse_name, read_adapter, tensor_name
from marlaas_worker.base_model import load_base_model
from marlaas_worker.rollout.tokenizer import PretrainedTokenizer


class Reader:
    """The base model with its tokenizer: computes the probability of a bet at information sets, at temperature 1."""

    def __init__(self, model: Path) -> None:
        self._model: Any = load_base_model(model, torch.float32)
        self._tokenizer = PretrainedTokenizer.load(str(model))
        tokens = range(int(self._model.get_output_embeddings().weight.shape[0]))
        self._bets = torch.tensor([move_of(self._tokenizer.decode([token])) == BET for token in tokens])

    @torch.no_grad()
    def policy(self, adapter: Path | Mapping[str, bytes], known: Sequence[str]) -> dict[str, float]:
        """Return the probability that the first character of a reply is a bet's, by information set.

        Args:
            adapter: a PEFT folder, or its files by name.
        """
        rows = [self._tokenizer.encode(self._tokenizer.render([self._asked(one)])) for one in known]
        width = max(map(len, rows))
        ids = torch.tensor([row + row[-1:] * (width - len(row)) for row in rows])  # padding follows what is read
        tensors, config = read_adapter(adapter)
        logits = functional_call(self._model, self._merged(tensors, config.scaling), kwargs={"input_ids": ids}).logits
        last = logits[torch.arange(len(rows)), [len(row) - 1 for row in rows]]
        bets = last.double().softmax(-1)[:, self._bets].sum(-1).tolist()
        return dict(zip(known, bets, strict=True))

    def _merged(self, tensors: Tensors, scaling: float) -> dict[str, torch.Tensor]:
        """Return the weights of the adapted layers with the adapter added."""
        weights = dict(self._model.named_parameters())
        modules = sorted({parse_name(name)[0] for name in tensors})
        added = {one: tensors[tensor_name(one, "B")] @ tensors[tensor_name(one, "A")] for one in modules}
        return {f"{one}.weight": weights[f"{one}.weight"] + scaling * change for one, change in added.items()}

    @staticmethod
    def _asked(known: str) -> ChatMessage:
        return ChatMessage(role="user", content=prompt(known))


def policies_of(run: Run, model: str) -> dict[str, list[dict[str, float]]]:
    """Return each agent's policy before training and after each step.

    Args:
        model: name of the builtin base model.
    """
    (name,) = run.jobs()
    reader, records = Reader(prepare(model)), run.records[name]
    namespace, job = name.split("/")
    found = {}
    for player, agent in enumerate(PLAYERS):
        first = AdapterRef(namespace, job, records[0]["uid"], agent, 0)
        versions = [0, *(record["agents"][agent]["version"] for record in records)]
        read = {one: reader.policy(files_of(run.folder, first.at(one)), SETS[player]) for one in set(versions)}
        found[agent] = [read[one] for one in versions]
    return found


def files_of(folder: Path, adapter: AdapterRef) -> dict[str, bytes]:
    """Return the files of a version from a run's blob store, which keeps those of all versions."""
    stored = OutFolder(folder).blobs / adapter.blob_prefix
    return {name: next(stored.glob(f"*-{name}")).read_bytes() for name in (CONFIG_FILE, TENSORS_FILE)}
