"""What samples for the trainers' tests."""

from typing import Any

import torch

VOCABULARY = 61


class Sampler:
    """Plain transformers with an adapter merged into its weights: knows nothing of the trainer's code."""

    def __init__(self, folder):
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        self._plain = {name: value.clone() for name, value in self._model.state_dict().items()}

    def merge(self, adapter, scaling):
        weights = {name: value.clone() for name, value in self._plain.items()}
        for name in (name for name in adapter if ".lora_A." in name):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weights[f"{module}.weight"] += scaling * adapter[name.replace("lora_A", "lora_B")] @ adapter[name]
        self._model.load_state_dict(weights)

    @torch.no_grad()
    def logprobs(self, ids, temperature=1.0):
        """Logprobs [T - 1, V] of what follows each id."""
        logits: torch.Tensor = self._model(input_ids=torch.tensor([list(ids)])).logits[0]
        return (logits / temperature).log_softmax(-1)

    def sample(self, prompt, num_tokens, temperature, seed):
        draw = torch.Generator().manual_seed(seed)
        ids, logprobs = list(prompt), []
        for _ in range(num_tokens):
            row = self.logprobs(ids, temperature)[-1]
            ids.append(int(torch.multinomial(row.exp(), 1, generator=draw)))
            logprobs.append(float(row[ids[-1]]))
        return ids[len(prompt) :], logprobs
