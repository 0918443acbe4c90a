"""Mode T of `bench multitenant`: one job of the workload with TRL's `GRPOTrainer`, on-policy; prints the times of its steps' ends as JSON.

`main` runs in TRL's environment, `rate` here. TRL trains one job per process, so the rate of jobs one after another is
that of one. The episodes of a step take their turns together, in one generation; their tools wait at the same time.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from bench.multitenant_workload import GROUP_SIZE, GROUPS_PER_STEP, Mode, Workload, manifests
from bench.runs import kept
from bench.sources import ROOT
from bench.trl_env import REQUIREMENTS, process_variables, trl_python

_MODE = Mode("T", strict=True, together=False)


def rate(workload: Workload, out: Path, threads: int, number: int = 0) -> float:
    """Return TRL's steps per second, from its first step to its last; kept under `out`. number: of the round.

    Raises RuntimeError if it fails.
    """
    job = next(one["spec"] for one in manifests(workload, _MODE, 1) if one["kind"] == "RLJob")
    path = out / str(workload) / f"round-{number}" / "T.json"
    own_code = [Path(__file__).read_text(), REQUIREMENTS.read_text()]
    return steps_per_s(kept(path, [job, threads, *own_code], lambda: _train(job, path, threads))["step_ends"])


def steps_per_s(step_ends: Sequence[float]) -> float:
    """Return the rate after the first step, which includes the start. step_ends: in seconds."""
    return (len(step_ends) - 1) / (step_ends[-1] - step_ends[0])


def _train(job: dict[str, Any], path: Path, threads: int) -> dict[str, Any]:
    from marlaas.models import prepare

    document = path.with_suffix(".yaml")
    document.parent.mkdir(parents=True, exist_ok=True)
    document.write_text(yaml.safe_dump(job))
    command = [str(trl_python()), "-m", "bench.multitenant_trl", str(prepare("tiny")), str(document)]
    done = subprocess.run(command, cwd=ROOT, env=process_variables(threads), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"TRL's side ended with code {done.returncode}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


class Play:
    """Episodes of `calculator` that take their turns together; TRL's `rollout_func`."""

    def __init__(self, job: dict[str, Any], tokenizer: Any) -> None:
        self._args, self._turns = job["environment"]["args"], job["rollout"]["maxTurns"]
        self._tokenizer = tokenizer

    def rollout(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any] | None]:
        """Return the tokens of each prompt's episode; `env_mask` is 1 for generated ones."""
        from bench.multitenant_env import wait_s
        from marlaas.environment import Split, Task
        from marlaas.models.curriculum import requested_expression, tool_reply

        texts = [self._rendered(prompt) for prompt in prompts]
        starts = [self._ids(text) for text in texts]
        ids, masks = [list(start) for start in starts], list[list[int]]([] for _ in prompts)
        going, num_calls = list(range(len(prompts))), 0
        for _ in range(self._turns):
            replies, _ = trainer._generate_single_turn([ids[at] for at in going], None, {}, GROUP_SIZE)
            waits, asking = [], []
            for at, reply in zip(going, replies, strict=True):
                ids[at] += reply
                masks[at] += [1] * len(reply)
                said = self._tokenizer.decode(reply, skip_special_tokens=True)
                if (expression := requested_expression(said)) is not None:
                    task, num_calls = Task(Split.TRAIN, num_calls, 0), num_calls + 1
                    waits.append(
                        wait_s(task, expression, self._args.get("median_s", 0.0), self._args.get("sigma", 0.0))
                    )
                    result = self._ids(self._rendered([{"role": "tool", "content": tool_reply(expression)}]))
                    asking.append((at, result))
            if not asking:
                break
            time.sleep(max(waits))
            for at, result in asking:
                ids[at] += result
                masks[at] += [0] * len(result)
            going = [at for at, _ in asking]
        completions = [one[len(start) :] for one, start in zip(ids, starts, strict=True)]
        return {"prompt_ids": starts, "completion_ids": completions, "logprobs": None, "env_mask": masks}

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return text

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return found


def main() -> None:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Times of the steps' ends."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.monotonic())

    clock = Clock()
    _trainer(sys.argv[1], yaml.safe_load(Path(sys.argv[2]).read_text()), clock).train()
    print(json.dumps({"step_ends": clock.ends}), flush=True)


def _trainer(model: str, job: dict[str, Any], clock: Any) -> Any:
    """Return TRL's trainer of a job. clock: a callback."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    from bench.trl_data import LAYERS
    from marlaas.models.curriculum import calculator_task
    from marlaas_api.names import Split, derive_seed

    tokenizer, seed = AutoTokenizer.from_pretrained(model, padding_side="left"), job["training"]["seed"]
    tasks = [calculator_task(Split.TRAIN, derive_seed(seed, at)) for at in range(GROUPS_PER_STEP * 64)]
    adapter = job["agents"][0]["adapter"]
    return GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [float(len(one[0]["content"]) % 2) for one in completions],
        args=_config(job),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": one.prompt}]} for one in tasks]),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=adapter["rank"], lora_alpha=adapter["alpha"], target_modules=list(LAYERS), task_type="CAUSAL_LM"
        ),
        rollout_func=Play(job, tokenizer).rollout,
        callbacks=[clock],
    )


def _config(job: dict[str, Any]) -> Any:
    """Return the arguments of TRL's trainer; one step more than the job has, because the first includes the start."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=GROUP_SIZE * GROUPS_PER_STEP,
        num_generations=GROUP_SIZE,
        max_completion_length=job["rollout"]["maxTokens"],
        max_steps=1 + job["training"]["steps"],
        learning_rate=float(job["training"]["optimizer"]["learningRate"]),
        beta=0.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main()
