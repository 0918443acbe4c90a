"""TRL's side of `bench trl`, run in TRL's environment: a manifest's job with `GRPOTrainer`, on the same tasks, prompts and rewards.

Settings are those of the manifest; others have TRL's defaults, except where another value makes TRL faster here: no
gradient checkpointing, float32 (bfloat16 is slower on most CPUs), one generation of the whole step's completions at
once, no saving. Task k of a step is the job's own k-th training task.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.trl_data import LAYERS
from marlaas.environment import Split, Task
from marlaas.envs.loading import resolve
from marlaas.envs.playing import play_episode
from marlaas.envs.scripted import RecordedReplies
from marlaas.episode_state import EpisodeState
from marlaas_api.names import derive_seed

AGENT = "policy"
SAME_LOSS = {"grpo": ("grpo", 0.2, 0.2), "dapo": ("dapo", 0.2, 0.28)}
"""For each algorithm, TRL's loss_type, epsilon and epsilon_high. Both implementations average grpo over sequences and dapo over tokens."""


class Tasks:
    """The job's environment, as a source of prompts and rewards."""

    def __init__(self, job: dict[str, Any], seed: int) -> None:
        environment = job["environment"]
        self._environment = resolve(environment["name"], environment["args"]).create()
        self._seed = seed

    def prompt(self, split: Split, index: int) -> list[dict[str, str]]:
        """Return the first messages of an episode."""
        messages = self._play(split, index, "").asked[0].request.append
        assert not isinstance(messages, str)
        return [{"role": message.role, "content": message.content} for message in messages]

    def reward(self, split: Split, index: int, reply: str) -> float:
        state = EpisodeState([AGENT], RecordedReplies(lambda _: reply))
        return play_episode(self._environment, self._task(split, index), state).rewards[AGENT]

    def _play(self, split: Split, index: int, reply: str) -> RecordedReplies:
        channel = RecordedReplies(lambda _: reply)
        play_episode(self._environment, self._task(split, index), EpisodeState([AGENT], channel))
        return channel

    def _task(self, split: Split, index: int) -> Task:
        return Task(split, index, derive_seed(self._seed, split.value, index))


class TrlRun:
    """One training run; `rewards` collects the mean reward of each step."""

    def __init__(self, options: argparse.Namespace) -> None:
        documents = list(yaml.safe_load_all(options.manifest.read_text()))
        self.job: dict[str, Any] = next(one["spec"] for one in documents if one and one["kind"] == "RLJob")
        self.steps = options.steps or int(self.job["training"]["steps"])
        self.seed, self.per_device = options.seed, options.per_device
        self.tasks = Tasks(self.job, options.seed)
        self.tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
        self.trainer = self._trainer(options.model)
        self.rewards: list[float] = []

    def _trainer(self, model: str) -> Any:
        adapter = self.job["agents"][0]["adapter"]
        number = self.steps * self.job["training"]["groupsPerStep"]
        rows = [{"prompt": self.tasks.prompt(Split.TRAIN, index), "index": index} for index in range(number)]
        return GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            reward_funcs=self._reward,
            args=self._config(),
            train_dataset=Dataset.from_list(rows),
            processing_class=self.tokenizer,
            peft_config=LoraConfig(
                r=adapter["rank"], lora_alpha=adapter["alpha"], target_modules=list(LAYERS), task_type="CAUSAL_LM"
            ),
        )

    def _config(self) -> GRPOConfig:
        rollout, training = self.job["rollout"], self.job["training"]
        completions = rollout["groupSize"] * training["groupsPerStep"]
        loss_type, low, high = SAME_LOSS[training.get("algorithm", "dapo")]
        return GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=self.per_device,
            gradient_accumulation_steps=completions // self.per_device,
            num_generations=rollout["groupSize"],
            max_completion_length=rollout["maxTokens"],
            temperature=rollout.get("temperature", 1.0),
            max_steps=self.steps,
            learning_rate=float(training["optimizer"]["learningRate"]),
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            beta=0.0,
            num_iterations=1,
            loss_type=loss_type,
            epsilon=low,
            epsilon_high=high,
            shuffle_dataset=False,
            seed=self.seed,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
        )

    def _reward(self, completions: list[Any], index: list[int], **_: Any) -> list[float]:
        replies = [completion[0]["content"] for completion in completions]
        return [self.tasks.reward(Split.TRAIN, *pair) for pair in zip(index, replies, strict=True)]

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean reward of one reply to each held-out task, at the training temperature."""
        model, number = self.trainer.model, self.job["evaluation"]["tasks"]
        was_training = model.training
        model.eval()
        inputs = self.tokenizer.apply_chat_template(
            [self.tasks.prompt(Split.EVAL, index) for index in range(number)],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        ids = model.generate(**inputs, generation_config=self.trainer.generation_config)
        replies = self.tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        model.train(was_training)
        return statistics.fmean(self.tasks.reward(Split.EVAL, *pair) for pair in enumerate(replies))


class StepLogger(TrainerCallback):  # type: ignore[misc]
    """Print a line per step, and evaluate at the job's evaluation steps."""

    def __init__(self, run: TrlRun) -> None:
        self._run, self._began = run, time.monotonic()
        self.evaluations: list[tuple[int, float]] = [(0, run.evaluate())]

    def on_log(self, _: Any, state: Any, __: Any, logs: Any = None, **___: Any) -> None:
        if logs and "reward" in logs:
            self._run.rewards.append(float(logs["reward"]))
            print_json(
                step=state.global_step, reward=logs["reward"], elapsed_s=round(time.monotonic() - self._began, 1)
            )

    def on_step_end(self, _: Any, state: Any, __: Any, **___: Any) -> None:
        if state.global_step % self._run.job["evaluation"]["every"] == 0 or state.global_step == self._run.steps:
            self.evaluations.append((state.global_step, self._run.evaluate()))


def print_json(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--per-device", type=int, required=True)
    began = time.monotonic()
    run = TrlRun(parser.parse_args())
    logger = StepLogger(run)
    run.trainer.add_callback(logger)
    trained = time.monotonic()
    run.trainer.train()
    print_json(
        seed=run.seed,
        steps=run.steps,
        rewards=run.rewards,
        evaluations=logger.evaluations,
        eval_before=logger.evaluations[0][1],
        eval_after=logger.evaluations[-1][1],
        train_s=round(time.monotonic() - trained, 1),
        inside_s=round(time.monotonic() - began, 1),
    )


if __name__ == "__main__":
    main()
