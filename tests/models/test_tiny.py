"""The model that the project trains itself: what it can do before reinforcement learning, and that training is exact."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from marlaas.models import list_models, prepare
from marlaas.models.curriculum import calculator_task, requested_expression, reverse_task, tool_reply
from marlaas.models.demonstrations import Mistakes
from marlaas.models.tiny import Recipe, build_tiny, train
from marlaas.models.tokenizer import END, PAD, VOCABULARY, TemplateMessage, encode
from marlaas_api.names import Split

SHORT = Recipe(num_steps=4, num_layers=1, reverse_rows=4, calculator_rows=4)
NOISIER = Mistakes(letter=1, untooled=1, call=1, result=1)
NUM_HELD_OUT = 512


class Player:
    """Samples replies of a model at temperature 1, many conversations at once."""

    def __init__(self, folder: Path, greedy: bool) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._greedy = greedy

    def reply(self, conversations: Sequence[Sequence[TemplateMessage]]) -> list[str]:
        import torch

        prompts = [[*encode(conversation)[0], VOCABULARY["<|assistant|>"]] for conversation in conversations]
        width = max(map(len, prompts))
        ids = torch.tensor([[VOCABULARY[PAD]] * (width - len(prompt)) + prompt for prompt in prompts])
        sampling = {"do_sample": False} if self._greedy else {"do_sample": True, "top_k": 0, "temperature": 1.0}
        mask = (ids != VOCABULARY[PAD]).long()
        whole = self._model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=16, **sampling)
        return [text.split(END)[0] for text in self._tokenizer.batch_decode(whole[:, width:])]


def asked(task: Any) -> list[TemplateMessage]:
    return [TemplateMessage("user", task.prompt)]


def reversed_share(player: Player) -> float:
    tasks = [reverse_task(Split.EVAL, seed) for seed in range(NUM_HELD_OUT)]
    replies = player.reply([asked(task) for task in tasks])
    return sum(reply == task.answer for task, reply in zip(tasks, replies, strict=True)) / NUM_HELD_OUT


def calculated_share(player: Player) -> float:
    """Share of the tasks that are right after one call and one reply, which is all that most episodes take."""
    tasks = [calculator_task(Split.EVAL, seed) for seed in range(NUM_HELD_OUT)]
    replies = player.reply([asked(task) for task in tasks])
    calls = [(task, reply) for task, reply in zip(tasks, replies, strict=True) if requested_expression(reply)]
    talks = [
        [
            *asked(task),
            TemplateMessage("assistant", call),
            TemplateMessage("tool", tool_reply(call.removeprefix("calc: "))),
        ]
        for task, call in calls
    ]
    right = [reply == task.answer for (task, _), reply in zip(calls, player.reply(talks), strict=True)]
    return sum(right) / NUM_HELD_OUT


@pytest.fixture(scope="module")
def folder() -> Path:
    return prepare("tiny")


@pytest.mark.slow
@pytest.mark.parametrize("share", [reversed_share, calculated_share])
def test_it_is_right_often_enough_to_learn_and_seldom_enough_to_have_something_to_learn(folder: Path, share) -> None:
    import torch

    torch.manual_seed(0)
    assert 0.15 < share(Player(folder, greedy=False)) < 0.40
    assert share(Player(folder, greedy=True)) > 0.9, "its best reply is almost always right"


@pytest.mark.slow
def test_its_folder_is_what_engines_and_trainers_load(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (model.config.head_dim, model.config.eos_token_id) == (32, tokenizer.eos_token_id)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size == pytest.approx(next(m.size_bytes for m in list_models() if m.name == "tiny"), rel=0.1)


def test_training_is_a_function_of_the_recipe(tmp_path: Path) -> None:
    def weights(name: str, recipe: Recipe) -> bytes:
        (tmp_path / name).mkdir()
        build_tiny(tmp_path / name, lambda share: None, recipe)
        return (tmp_path / name / "model.safetensors").read_bytes()

    first = weights("first", SHORT)
    assert weights("again", SHORT) == first
    for name, other in (("seed", replace(SHORT, seed=1)), ("noise", replace(SHORT, mistakes=NOISIER))):
        assert weights(name, other) != first


def test_training_leaves_the_callers_randomness_and_threads_alone(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(7)
    expected, num_threads = torch.rand(3), torch.get_num_threads()
    torch.manual_seed(7)
    build_tiny(tmp_path, lambda share: None, SHORT)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == num_threads


def test_progress_goes_from_nothing_to_all() -> None:
    shares: list[float] = []
    train(SHORT, shares.append)
    assert shares == [0.25, 0.5, 0.75, 1.0]
