"""`marlaas run examples/quickstart.yaml` with the real engine, as the README says, looked at more closely; and what the adapter it leaves is worth elsewhere."""

import json
import math
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.harness import pool_document

from marlaas.episodes.files import read_all
from marlaas.episodes.usage import usage_of
from marlaas.local.records import open_jobs
from marlaas_worker.rollout.engine import LoadedAdapter

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(3600)]

NUM_HELD_OUT = 160
"""More than in the manifest, so that the draw of the tasks does not decide: a standard deviation of 0.017 at 0.95, not 0.027."""
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


@dataclass(frozen=True)
class Finished:
    out: Path
    code: int
    words: str
    jobs: dict[str, dict[str, float | str]]


@pytest.fixture(scope="session")
def quickstart(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("quickstart")
    out, manifest = folder / "out", folder / "quickstart.yaml"
    text = QUICKSTART.read_text()
    assert text.count("tasks: 64") == 2
    text = re.sub(r"every: \d+", "every: 1000", text)  # only at the beginning and at the end
    manifest.write_text(text.replace("tasks: 64", f"tasks: {NUM_HELD_OUT}"))
    command = [sys.executable, "-m", "marlaas", "run", str(manifest), "--out", str(out), "--seed", "0"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    summary = out / "summary.json"
    jobs = json.loads(summary.read_text())["jobs"] if summary.exists() else {}
    return Finished(out, done.returncode, done.stdout, jobs)


def test_both_jobs_learn_from_the_stated_start_to_the_stated_end(quickstart):
    assert quickstart.code == 0, quickstart.words[-3000:]
    assert set(quickstart.jobs) == {"team-a/reverse", "team-b/calculator"}
    for name, job in quickstart.jobs.items():
        assert job["phase"] == "Succeeded", name
        assert job["evalBefore"] <= 0.45, name
        assert job["evalAfter"] >= 0.85, name
        assert job["faults"] == {}, name


def test_what_sampled_is_what_trained_at_version_0(quickstart):
    for name in quickstart.jobs:
        records = [json.loads(line) for line in (quickstart.out / name / "steps.jsonl").read_text().splitlines()]
        assert records[0]["staleness_max"] == 0
        assert records[0]["metrics"]["logprob_gap"] <= 1e-4, name


def test_everything_a_person_looks_for_is_there(quickstart):
    for name in quickstart.jobs:
        folder = quickstart.out / name
        assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
        assert {path.name for path in (folder / "adapter").iterdir()} >= {
            "adapter_model.safetensors",
            "adapter_config.json",
        }
        assert len(list((folder / "logs").iterdir())) >= 4
    assert "reverse: " in quickstart.words, "held-out prompts are shown"


def test_every_token_that_the_engine_generated_is_in_an_episode_and_in_the_usage(quickstart):
    jobs = open_jobs(quickstart.out)
    assert jobs
    for one in jobs:
        used = usage_of(one.document, read_all(one.folder), one.steps(), one.progress).amounts
        assert one.progress is not None
        assert used.generated_tokens >= one.progress.tokens > 0, "an engine's report may come after the job's end"
        assert used.unrecorded_tokens == used.repeated_tokens == used.failed_tokens == used.open_tokens == 0
        assert used.evaluation_tokens > 0
        assert 0 < used.trained_tokens <= used.generated_tokens < used.prompt_tokens
        counted = one.progress.amounts
        assert counted.unrecorded_tokens == 0
        assert counted.model_dump() == pytest.approx(used.model_dump())


def test_nothing_is_left_running(quickstart):
    left = [
        one.info["cmdline"]
        for one in psutil.process_iter(["cmdline"])
        if str(quickstart.out) in " ".join(one.info["cmdline"] or [])
    ]
    assert left == []


def right_answers(model: Path, number: int = 24) -> list[tuple[np.ndarray, int]]:
    """Conversations with the right reply: token ids [T], and how many of them are the prompt."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = random.Random(0)
    found = []
    for _ in range(number):
        word = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 5)))
        messages = [{"role": "user", "content": f"reverse: {word}"}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt + word[::-1] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        length = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        found.append((np.array(ids, dtype=np.int32), length))
    return found


def mean_probability(logprobs: list[np.ndarray], cases: list[tuple[np.ndarray, int]]) -> float:
    """Mean probability of the right replies, from logprobs [T-1] of ids 1.. ."""
    values = [math.exp(float(row[length - 1 :].sum())) for row, (_, length) in zip(logprobs, cases, strict=True)]
    return sum(values) / len(values)


def peft_logprobs(model: Path, adapter: Path | None, cases: list[tuple[np.ndarray, int]]) -> list[np.ndarray]:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if adapter is not None:
        policy = PeftModel.from_pretrained(policy, str(adapter)).eval()
    rows = []
    for ids, _ in cases:
        tokens = torch.from_numpy(ids.astype(np.int64))
        with torch.no_grad():
            logits = policy(tokens[None]).logits[0, :-1]
        rows.append(logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].numpy())
    return rows


async def test_the_adapter_is_a_plain_peft_folder_that_shows_the_behaviour_in_peft_and_in_vllm(
    quickstart, tiny_model, tmp_path
):
    from marlaas_worker.rollout.vllm_engine import VllmEngine

    adapter = quickstart.out / "team-a" / "reverse" / "adapter"
    cases = right_answers(tiny_model)
    before = mean_probability(peft_logprobs(tiny_model, None, cases), cases)
    in_peft = peft_logprobs(tiny_model, adapter, cases)
    assert before <= 0.5
    assert mean_probability(in_peft, cases) >= 0.85
    rollout = {"dtype": "float32", "maxModelLen": 256, "kvCacheBytes": "64Mi"}
    spec = pool_document(tiny_model, adapterSlots=2, maxRank=8, rollout=rollout).spec
    engine = VllmEngine(tiny_model, spec, frozenset(), tmp_path)
    await engine.start()
    try:
        loaded = LoadedAdapter("elsewhere", 1, adapter)
        await engine.load(loaded)
        in_vllm = [await engine.score(loaded, ids) for ids, _ in cases]
    finally:
        await engine.stop()
    assert mean_probability(in_vllm, cases) >= 0.85
    for ours, theirs in zip(in_vllm, in_peft, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-3)
