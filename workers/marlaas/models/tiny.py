"""Builtin model `tiny`: a character-level Llama that this project trains itself, for tests and demos.

It is trained on right conversations first, so that it learns to copy and to reverse. Then it is trained on the
noisy ones of `demonstrations`, so that sampling makes known mistakes. The same seed on the same machine gives the
same weights; other machines differ in rounding only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from marlaas.models.demonstrations import NO_MISTAKES, Mistakes, calculator_demonstration, reverse_demonstration
from marlaas.models.saving import save_weights
from marlaas.models.tokenizer import END, PAD, VOCABULARY, TemplateMessage, encode, save_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM

MAX_TOKENS = 512
NUM_THREADS = 1
IGNORED = -100
MISTAKES = Mistakes(letter=0.27, untooled=0.6, call=0.3, result=0.4)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hyperparameters of `tiny`. `noisy_share` is the final share of the steps whose conversations contain mistakes."""

    seed: int = 0
    num_layers: int = 3
    hidden: int = 128
    intermediate: int = 384
    num_steps: int = 300
    reverse_rows: int = 48
    calculator_rows: int = 24
    learning_rate: float = 3e-3
    noisy_share: float = 0.35
    mistakes: Mistakes = MISTAKES

    @property
    def first_noisy_step(self) -> int:
        """The first step whose conversations contain mistakes."""
        return int(self.num_steps * (1 - self.noisy_share))


def build_tiny(folder: Path, report: Callable[[float], None], recipe: Recipe = Recipe()) -> None:
    """Train the model and write it, in Hugging Face format, into an existing empty folder.

    `report` is called with the finished share, 0 to 1.
    """
    with _fixed_torch(recipe.seed):
        model = train(recipe, report)
    save_weights(model, folder)
    save_tokenizer(folder, MAX_TOKENS)


def train(recipe: Recipe, report: Callable[[float], None]) -> LlamaForCausalLM:
    """Return the trained model. report: called with the part of the training that is done, from 0 to 1."""
    model = _untrained(recipe)
    optimizers = _optimizers(model)
    for step, conversations in enumerate(_batches(recipe)):
        if step == recipe.first_noisy_step:
            _freeze_scale(model)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = recipe.learning_rate * _schedule(step / recipe.num_steps)
        _train_step(model, optimizers, conversations)
        report((step + 1) / recipe.num_steps)
    return model.eval()


@contextmanager
def _fixed_torch(seed: int) -> Iterator[None]:
    """Set torch's seed and number of threads, because they affect the weights; restore the caller's values afterwards."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(num_threads)


def _freeze_scale(model: LlamaForCausalLM) -> None:
    """Freeze embeddings and norms before the conversations with mistakes.

    They determine how sharp a distribution can be, and adapters do not train them. A model that learned uncertainty
    there could not be trained out of it.
    """
    for name, parameter in model.named_parameters():
        if "embed" in name or "norm" in name:
            parameter.requires_grad_(False)
            parameter.grad = None


def _optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices, which learns to reverse in a third of AdamW's steps, and AdamW for the rest."""
    import torch

    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", weight_decay=0.0),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _untrained(recipe: Recipe) -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=recipe.hidden,
            intermediate_size=recipe.intermediate,
            num_hidden_layers=recipe.num_layers,
            num_attention_heads=recipe.hidden // 32,
            num_key_value_heads=recipe.hidden // 64,
            head_dim=32,
            max_position_embeddings=MAX_TOKENS,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=VOCABULARY[END],
            pad_token_id=VOCABULARY[PAD],
        )
    ).float()


def _batches(recipe: Recipe) -> Iterator[list[list[list[TemplateMessage]]]]:
    """Yield, per step, one list of conversations per task: rows of similar length need little padding."""
    rng = random.Random(recipe.seed)
    for step in range(recipe.num_steps):
        mistakes = recipe.mistakes if step >= recipe.first_noisy_step else NO_MISTAKES
        yield [
            [reverse_demonstration(rng.getrandbits(62), mistakes) for _ in range(recipe.reverse_rows)],
            [calculator_demonstration(rng.getrandbits(62), mistakes) for _ in range(recipe.calculator_rows)],
        ]


def _train_step(
    model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], conversations: list[list[list[TemplateMessage]]]
) -> None:
    import torch

    for rows in conversations:
        ids, labels = _padded(rows)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _padded(rows: list[list[TemplateMessage]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels, both [B, T], padded on the right. Labels are set only for the assistant's tokens."""
    import torch

    encoded = [encode(row) for row in rows]
    width = max(len(ids) for ids, _ in encoded)
    ids = torch.full((len(rows), width), VOCABULARY[PAD])
    labels = torch.full((len(rows), width), IGNORED)
    for row, (tokens, written) in enumerate(encoded):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, : len(tokens)] = torch.tensor([t if w else IGNORED for t, w in zip(tokens, written, strict=True)])
    return ids, labels


def _schedule(done: float) -> float:
    """Return the share of the peak learning rate: warm-up over 5 % of the steps, then a half cosine down to 5 %."""
    if done < 0.05:
        return (done + 0.01) / 0.06
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (done - 0.05) / 0.95))
