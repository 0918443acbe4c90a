"""TRL's side of `bench trl_step`, run in TRL's environment: one `GRPOTrainer`, its loss and its backward on a given batch."""

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from bench.trl_data import ALPHA, CLIP_HIGH, CLIP_LOW, LAYERS, LEARNING_RATE, RANK, SHAPES, Group, answer, batch


def trainer(model: str, per_device: int, checkpointing: bool) -> Any:
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=checkpointing,
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=8,
        num_generations=2,
        disable_tqdm=True,
        learning_rate=LEARNING_RATE,
        epsilon=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        report_to="none",
    )
    return GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 64}),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(LAYERS), task_type="CAUSAL_LM"),
    )


def inputs(groups: list[Group], per_device: int) -> list[dict[str, torch.Tensor]]:
    """Return the loss inputs that `_generate_and_score_completions` would produce, split into per-device batches.

    Prompts are padded on the left and completions on the right, to the longest of the whole batch.
    """
    prompts = [group.prompt for group in groups for _ in group.replies]
    replies = [reply for group in groups for reply in group.replies]
    longest_prompt, longest = max(map(len, prompts)), max(map(len, replies))
    whole = {
        "prompt_ids": torch.tensor([[2] * (longest_prompt - len(ids)) + ids for ids in prompts]),
        "prompt_mask": torch.tensor([[0] * (longest_prompt - len(ids)) + [1] * len(ids) for ids in prompts]),
        "completion_ids": torch.tensor([ids + [2] * (longest - len(ids)) for ids in replies]),
        "completion_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in replies]),
        "advantages": torch.tensor([value for group in groups for value in group.advantages]),
    }
    count = torch.tensor(float(sum(map(len, replies))))
    return [
        {name: values[start : start + per_device] for name, values in whole.items()} | {"num_items_in_batch": count}
        for start in range(0, len(prompts), per_device)
    ]


def stepper(model: str, groups: list[Group], per_device: int, checkpointing: bool) -> Callable[[], None]:
    grpo = trainer(model, per_device, checkpointing)
    policy, parts = grpo.model, inputs(groups, per_device)
    policy.train()
    grpo.current_gradient_accumulation_steps = len(parts)
    parameters = [value for value in policy.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)

    def step() -> None:
        for part in parts:
            grpo.accelerator.backward(grpo.compute_loss(policy, part))
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--per-device", type=int, required=True)
    parser.add_argument("--checkpointing", action="store_true")
    options = parser.parse_args()
    answer(stepper(options.model, batch(SHAPES[options.shape]), options.per_device, options.checkpointing))
