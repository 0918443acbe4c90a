import re
from collections.abc import Callable
from typing import Any

import pytest

from marlaas.environment import EpisodeState, Message, Split, Task, TurnRequest
from marlaas.envs.loading import resolve
from marlaas.envs.playing import Outcome, play_episode
from marlaas.envs.scripted import RecordedReplies
from marlaas.models.curriculum import requested_expression, tool_reply
from marlaas_api.errors import InvalidInput

Answer = Callable[[TurnRequest], str]
TASK = Task(Split.EVAL, 0, 7)


def play(name: str, args: dict[str, Any], answer: Answer, task: Task = TASK) -> tuple[Outcome, RecordedReplies]:
    channel = RecordedReplies(answer)
    outcome = play_episode(resolve(name, args).create(), task, EpisodeState(["policy"], channel))
    return outcome, channel


def said(request: TurnRequest) -> str:
    last = request.append[-1]
    assert isinstance(last, Message)
    return last.content


def reversed_word(request: TurnRequest) -> str:
    return said(request).removeprefix("reverse: ")[::-1]


def with_the_tool(request: TurnRequest) -> str:
    return f"calc: {said(request).removesuffix('=?')}" if said(request).endswith("=?") else said(request)


def prompts(name: str, args: dict[str, Any], split: Split, num: int, seed: int = 7) -> list[str]:
    return [said(play(name, args, lambda _: "", Task(split, index, seed))[1].asked[0].request) for index in range(num)]


def test_reverse_wants_the_word_reversed() -> None:
    outcome, channel = play("reverse", {}, reversed_word)
    assert re.fullmatch(r"reverse: [a-z]{3,5}", said(channel.asked[0].request))
    assert (outcome.rewards, outcome.metrics) == ({"policy": 1.0}, {"exact": 1.0})
    assert play("reverse", {}, lambda request: reversed_word(request) + "x")[0].rewards == {"policy": 0.0}


def test_reverse_can_give_a_share() -> None:
    outcome, _ = play(
        "reverse", {"partial": True, "min_length": 4, "max_length": 4}, lambda r: reversed_word(r)[:3] + "?"
    )
    assert (outcome.rewards, outcome.metrics) == ({"policy": 0.75}, {"exact": 0.0})


def test_calculator_pays_for_a_right_result_that_came_from_the_tool() -> None:
    outcome, channel = play("calculator", {}, with_the_tool)
    assert outcome.rewards == {"policy": 1.0}
    assert outcome.metrics == {"tool_calls": 1.0, "tool_used": 1.0}
    assert [asked.request.append[-1].role for asked in channel.asked] == ["user", "tool"]  # type: ignore[union-attr]


def test_calculator_does_not_pay_for_a_right_guess() -> None:
    outcome, _ = play("calculator", {}, lambda request: tool_reply(said(request).removesuffix("=?")))
    assert outcome.rewards == {"policy": 0.0}


def test_calculator_lets_a_wrong_call_be_made_again() -> None:
    def stumbling(request: TurnRequest) -> str:
        if said(request) == "error":
            return f"calc: {first.removesuffix('=?')}"
        return "calc: 1//2" if said(request).endswith("=?") else f"it is {said(request)}."

    first = prompts("calculator", {}, Split.EVAL, 1)[0]
    outcome, _ = play("calculator", {}, stumbling)
    assert (outcome.rewards, outcome.metrics["tool_calls"]) == ({"policy": 1.0}, 2.0)


def test_calculator_does_not_pay_for_a_wrong_result() -> None:
    outcome, _ = play("calculator", {}, lambda r: with_the_tool(r) if said(r).endswith("=?") else "123456")
    assert outcome.rewards == {"policy": 0.0}


def test_calling_for_ever_runs_out_of_turns() -> None:
    outcome, _ = play("calculator", {}, lambda _: "calc: 1+1")
    assert (outcome.ending, outcome.rewards) == ("max_turns", {"policy": 0.0})


def test_the_tools_latency_is_real_and_counted() -> None:
    assert play("calculator", {"tool_latency_s": 0.1}, with_the_tool)[0].tool_s >= 0.1


@pytest.mark.parametrize("operator", ["+", "-", "*"])
def test_calculator_keeps_to_its_arguments(operator: str) -> None:
    for split in Split:
        for prompt in prompts("calculator", {"max_operand": 9, "operators": operator}, split, 20):
            assert re.fullmatch(rf"[1-9]\{operator}[1-9]=\?", prompt)


SUMS = {"dataset": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


@pytest.mark.parametrize(
    ("name", "args"), [("reverse", {}), ("calculator", {"max_operand": 9}), ("reasoning-gym", SUMS)]
)
def test_tasks_are_reproducible_varied_and_never_in_both_splits(name: str, args: dict[str, Any]) -> None:
    trained, held_out = prompts(name, args, Split.TRAIN, 40), prompts(name, args, Split.EVAL, 40)
    assert trained == prompts(name, args, Split.TRAIN, 40)
    assert len(set(trained)) > 10
    assert not set(trained) & set(held_out)
    assert not set(prompts(name, args, Split.TRAIN, 40, seed=8)) & set(held_out)


def right_sum(request: TurnRequest) -> str:
    expression = re.search(r"\d+ [-+] \d+", said(request))
    assert expression is not None
    return tool_reply(expression[0])


def test_reasoning_gym_scores_the_answer_and_not_its_words() -> None:
    assert play("reasoning-gym", SUMS, right_sum)[0].rewards == {"policy": 1.0}
    wordy, _ = play("reasoning-gym", SUMS, lambda r: f"Let me see: 1 and 2 is not it, so {right_sum(r)}.")
    assert (wordy.rewards, wordy.metrics) == ({"policy": 1.0}, {"correct": 1.0, "formed": 0.0})
    assert play("reasoning-gym", SUMS, lambda r: f"{right_sum(r)}8")[0].rewards["policy"] < 1.0
    assert play("reasoning-gym", SUMS, lambda _: "no idea")[0].rewards == {"policy": 0.0}


def test_reasoning_gym_can_pay_for_form() -> None:
    args = {**SUMS, "shaping": {"exact": 0.25, "format": 0.125}}
    rewards = [
        play("reasoning-gym", args, answer)[0].rewards["policy"]
        for answer in (right_sum, lambda r: f"It is {right_sum(r)}.", lambda _: "-99", lambda _: "It is -99.")
    ]
    assert rewards == [1.0, 0.625, 0.125, 0.0]


def test_reasoning_gym_adds_a_system_prompt_and_a_suffix() -> None:
    args = {**SUMS, "system": "Be brief.", "suffix": "\nIn a tag.", "answer": "tag"}
    outcome, channel = play("reasoning-gym", args, lambda r: f"<answer>{right_sum(r)}</answer>")
    system, user = channel.asked[0].request.append
    assert (system, str(user.content).endswith("=\nIn a tag.")) == (Message("system", "Be brief."), True)  # type: ignore[union-attr]
    assert outcome.metrics == {"correct": 1.0, "formed": 1.0}


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("reverse", {"min_length": 2}, "words have 3 to 5 letters"),
        ("reverse", {"min_length": 5, "max_length": 4}, "5 to 4 letters"),
        ("calculator", {"operators": "+/"}, r"expected some of \+-\*"),
        ("calculator", {"max_operand": 100}, "expected 9 to 99"),
        ("calculator", {"tool_latency_s": -1}, "expected 0 or more seconds"),
        ("reasoning-gym", {"dataset": "chain_sums"}, "did you mean 'chain_sum'"),
        ("reasoning-gym", {"dataset": "chain_sum", "config": {"max_digit": 1}}, "did you mean 'max_digits'"),
        ("reasoning-gym", {"dataset": "chain_sum", "config": {"max_digits": -1}}, "rejects its config"),
        ("reasoning-gym", {"dataset": "chain_sum", "answer": "last"}, "expected one of"),
        ("reasoning-gym", {"dataset": "chain_sum", "shaping": {"exakt": 1}}, "did you mean 'exact'"),
        ("reasoning-gym", {"dataset": "chain_sum", "shaping": {"exact": 0.9, "format": 0.2}}, "at most 1"),
    ],
)
def test_arguments_that_a_builtin_cannot_take(name: str, args: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        resolve(name, args).create()


def test_a_call_is_what_the_model_is_taught() -> None:
    assert requested_expression("calc: 12+34") == "12+34"
