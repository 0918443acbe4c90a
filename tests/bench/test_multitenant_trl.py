"""Mode T of `bench multitenant`: its rate, from the ends of TRL's steps; and its episodes, whose tools are called by turns."""

from types import SimpleNamespace
from typing import Any

import pytest
from bench import multitenant_env
from bench import multitenant_trl as trl
from bench.multitenant_workload import Workload, manifests

WORKLOAD = Workload(8, 0.4, 3)


class Characters:
    """One id for each character; a message is rendered as its first letter and its content."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"{message['role'][0]}({message['content']})" for message in messages)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(one) for one in text]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


def test_the_rate_counts_from_the_end_of_the_first_step_and_is_kept(tmp_path, monkeypatch):
    trained: list[int] = []

    def train(job: dict[str, Any], *_: object) -> dict[str, Any]:
        trained.append(job["training"]["steps"])
        return {"step_ends": [100.0, 104.0, 106.0, 109.0]}

    monkeypatch.setattr(trl, "_train", train)
    assert [trl.rate(WORKLOAD, tmp_path, threads=2) for _ in range(2)] == pytest.approx([3 / 9, 3 / 9])
    assert trained == [3]
    trl.rate(WORKLOAD, tmp_path, threads=2, number=1)
    assert trained == [3, 3], "each round is measured"


def test_tools_of_a_step_wait_at_the_same_time_and_their_results_are_not_trained(monkeypatch):
    """The first episode calls the tool twice, the second never, the third in every turn."""
    replies = [["calc: 1+2", "4", "calc: 2*2"], ["calc: 3+3", "calc: oops"], ["6", "calc: 1+1"]]
    asked: list[list[str]] = []
    tokenizer = Characters()

    def generate(prompts: list[list[int]], *_: Any) -> tuple[list[list[int]], None]:
        asked.append([tokenizer.decode(ids) for ids in prompts])
        return [[ord(one) for one in reply] for reply in replies[len(asked) - 1]], None

    slept: list[float] = []
    waits = iter((0.5, 0.2, 0.1, 0.3, 0.4))
    monkeypatch.setattr(trl, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setattr(multitenant_env, "wait_s", lambda *_: next(waits))
    job = next(one["spec"] for one in manifests(WORKLOAD, trl._MODE, 1) if one["kind"] == "RLJob")
    prompts = [[{"role": "user", "content": text}] for text in "abc"]
    played = trl.Play(job, tokenizer).rollout(prompts, SimpleNamespace(_generate_single_turn=generate))
    assert slept == [0.5, 0.3, 0.4]
    assert asked[1] == ["u(a)calc: 1+2t(3)", "u(c)calc: 2*2t(4)"]
    said = [tokenizer.decode(ids) for ids in played["completion_ids"]]
    assert said == ["calc: 1+2t(3)calc: 3+3t(6)6", "4", "calc: 2*2t(4)calc: oopst(error)calc: 1+1t(2)"]
    trained = [
        "".join(letter for letter, is_own in zip(text, mask, strict=True) if is_own)
        for text, mask in zip(said, played["env_mask"], strict=True)
    ]
    assert trained == ["calc: 1+2calc: 3+36", "4", "calc: 2*2calc: oopscalc: 1+1"]
    assert [tokenizer.decode(ids) for ids in played["prompt_ids"]] == ["u(a)", "u(b)", "u(c)"]
