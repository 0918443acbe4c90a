"""First characters of replies, computed from adapters: nothing is sampled."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call

from bench.runs import Run
from marlaas.local.folder import OutFolder
from marlaas_api.messages import ChatMessage
from marlaas_api.names import AdapterRef
from marlaas_worker.adapters import CONFIG_FILE, TENSORS_FILE, Tensors, parse_name, read_adapter, tensor_name
from marlaas_worker.base_model import load_base_model
from marlaas_worker.rollout.tokenizer import PretrainedTokenizer

_ROWS = 512


class PolicyReader:
    """The base model with its tokenizer: computes the probabilities of the first token of replies, at temperature 1.

    Attributes:
        texts: text of each token, by its id.
    """

    def __init__(self, model: Path) -> None:
        self._model: Any = load_base_model(model, torch.float32)
        self._tokenizer = PretrainedTokenizer.load(str(model))
        num_tokens = int(self._model.get_output_embeddings().weight.shape[0])
        self.texts = [self._tokenizer.decode([token]) for token in range(num_tokens)]

    @torch.no_grad()
    def first_tokens(self, adapter: Path | Mapping[str, bytes], prompts: Sequence[str]) -> torch.Tensor:
        """Return the probabilities of the first token of the replies to some messages, [prompts, tokens], float64.

        Args:
            adapter: a PEFT folder, or its files by name.
        """
        tensors, config = read_adapter(adapter)
        weights = self._merged(tensors, config.scaling)
        parts = [prompts[start : start + _ROWS] for start in range(0, len(prompts), _ROWS)]
        return torch.cat([self._first_tokens(weights, part) for part in parts])

    def _first_tokens(self, weights: dict[str, torch.Tensor], prompts: Sequence[str]) -> torch.Tensor:
        asked = [ChatMessage(role="user", content=prompt) for prompt in prompts]
        rows = [self._tokenizer.encode(self._tokenizer.render([one])) for one in asked]
        width = max(map(len, rows))
        ids = torch.tensor([row + row[-1:] * (width - len(row)) for row in rows])  # padding follows what is read
        logits = functional_call(self._model, weights, kwargs={"input_ids": ids}).logits
        last = logits[torch.arange(len(rows)), [len(row) - 1 for row in rows]]
        return torch.softmax(last.double(), -1)

    def _merged(self, tensors: Tensors, scaling: float) -> dict[str, torch.Tensor]:
        """Return the weights of the adapted layers with the adapter added."""
        weights = dict(self._model.named_parameters())
        modules = sorted({parse_name(name)[0] for name in tensors})
        added = {one: tensors[tensor_name(one, "B")] @ tensors[tensor_name(one, "A")] for one in modules}
        return {f"{one}.weight": weights[f"{one}.weight"] + scaling * change for one, change in added.items()}


def versions_of(run: Run, agent: str) -> list[tuple[int, AdapterRef]]:
    """Return an agent's adapter before training and after each step, with the step: 0 before training."""
    (name,) = run.jobs()
    records = run.records[name]
    namespace, job = name.split("/")
    first = AdapterRef(namespace, job, records[0]["uid"], agent, 0)
    after = [(step, first.at(record["agents"][agent]["version"])) for step, record in enumerate(records, start=1)]
    return [(0, first), *after]


def files_of(folder: Path, adapter: AdapterRef) -> dict[str, bytes]:
    """Return the files of a version from a run's blob store, which keeps those of all versions."""
    stored = OutFolder(folder).blobs / adapter.blob_prefix
    return {name: next(stored.glob(f"*-{name}")).read_bytes() for name in (CONFIG_FILE, TENSORS_FILE)}
