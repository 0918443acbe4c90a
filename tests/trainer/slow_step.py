"""One optimizer step as a slow loop over plain transformers and peft, against which the trainer's step is compared."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.rl.papers import CAP, FORMS
from torch import Tensor

from marlaas_worker.trainer.rows import Segment

TEMPERATURE = 0.8


def owner_of(part: Segment, parts: list[Segment]) -> int:
    """The reply that a segment belongs to: its own unless it names a trajectory."""
    return part.trajectory if part.trajectory_tokens is not None else parts.index(part)


def slow_step(
    folder: Path, weights: dict[str, Tensor], parts: list[Segment], settings: dict[str, Any]
) -> tuple[dict[str, Tensor], float]:
    """Token by token, segment by segment, without padding; the loss as its paper writes it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=8, lora_alpha=16, target_modules=layers, lora_dropout=0.0)
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).eval()
    named = {name.replace(".default", ""): value for name, value in model.named_parameters() if "lora_" in name}
    with torch.no_grad():
        for name, value in named.items():
            value.copy_(weights[name])
    replies: dict[int, Any] = {}
    penalty, bonus, num_replies = torch.zeros(()), torch.zeros(()), len({owner_of(part, parts) for part in parts})
    for part in parts:
        logits = model(input_ids=torch.tensor([part.ids.tolist()])).logits[0] / TEMPERATURE
        with torch.no_grad(), model.disable_adapter():
            reference = (model(input_ids=torch.tensor([part.ids.tolist()])).logits[0] / TEMPERATURE).log_softmax(-1)
        places = np.flatnonzero(part.generated).tolist()
        pi = [logits[place - 1].log_softmax(-1)[int(part.ids[place])] for place in places]
        mu = [float(part.behaviour[place]) for place in places]
        reply = replies.setdefault(owner_of(part, parts), ([], [], [], part.advantage))
        for values, more in zip(reply, (pi, mu, [float(p.detach()) for p in pi]), strict=False):
            values.extend(more)
        for place, p, m in zip(places, pi, mu, strict=True):
            gap = p.detach() - reference[place - 1, int(part.ids[place])]
            weight = (p.detach() - m).exp().clamp(max=CAP if settings["ratio"] == "proximal" else 1e9)
            penalty = penalty + weight * gap * p / (part.num_trajectory_tokens * num_replies)
            spread = logits[place - 1].log_softmax(-1)
            bonus = bonus - (spread.exp() * spread).sum() / (part.num_trajectory_tokens * num_replies)
    batch = list(replies.values())
    objective = FORMS[settings["ratio"]][settings["algorithm"]](batch) + settings["entropy"] * bonus
    (settings["kl"] * penalty - objective).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(named.values(), settings["max_norm"]))
    torch.optim.AdamW(named.values(), lr=settings["rate"], weight_decay=0.0).step()
    return {name: value.detach().clone() for name, value in named.items()}, norm
