"""The model that the project trains itself: what it can do before reinforcement learning, and that training is exact."""

from dataclasses import replace

import pytest

from marlaas.models import list_models, prepare
from marlaas.models.curriculum import calculator_task, requested_expression, reverse_task, tool_reply
from marlaas.models.demonstrations import Mistakes
from marlaas.models.tiny import Recipe, build_tiny
from marlaas.models.tokenizer import END, PAD, VOCABULARY, TemplateMessage, encode
from marlaas_api.names import Split

SHORT = Recipe(num_steps=4, num_layers=1, reverse_rows=4, calculator_rows=4)
NOISIER = Mistakes(letter=1, untooled=1, call=1, result=1)
NUM_HELD_OUT = 512


class Player:
    """Samples replies of a model at temperature 1, many conversations at once."""

    def __init__(self, folder, greedy):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._model = AutoModelForCausalLM.from_pretrained(folder)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._sampling = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0, "temperature": 1.0}

    def reply(self, conversations):
        import torch

        prompts = [[*encode(conversation)[0], VOCABULARY["<|assistant|>"]] for conversation in conversations]
        width = max(map(len, prompts))
        ids = torch.tensor([[VOCABULARY[PAD]] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = (ids != VOCABULARY[PAD]).long()
        whole = self._model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=16, **self._sampling)
        return [text.split(END)[0] for text in self._tokenizer.batch_decode(whole[:, width:])]


def reversed_share(player):
    tasks = [reverse_task(Split.EVAL, seed) for seed in range(NUM_HELD_OUT)]
    replies = player.reply([[TemplateMessage("user", task.prompt)] for task in tasks])
    return sum(reply == task.answer for task, reply in zip(tasks, replies, strict=True)) / NUM_HELD_OUT


def calculated_share(player):
    """Share of the tasks that are right after one call and one reply, which is all that most episodes take."""
    tasks = [calculator_task(Split.EVAL, seed) for seed in range(NUM_HELD_OUT)]
    replies = player.reply([[TemplateMessage("user", task.prompt)] for task in tasks])
    calls = [(task, reply) for task, reply in zip(tasks, replies, strict=True) if requested_expression(reply)]
    told = [(task, call, tool_reply(call.removeprefix("calc: "))) for task, call in calls]
    said = [(("user", task.prompt), ("assistant", call), ("tool", reply)) for task, call, reply in told]
    answers = player.reply([[TemplateMessage(*one) for one in talk] for talk in said])
    return sum(answer == task.answer for (task, _), answer in zip(calls, answers, strict=True)) / NUM_HELD_OUT


@pytest.fixture(scope="module")
def folder():
    return prepare("tiny")


@pytest.mark.slow
@pytest.mark.parametrize("share", [reversed_share, calculated_share])
def test_it_is_right_often_enough_to_learn_and_seldom_enough_to_have_something_to_learn(folder, share):
    import torch

    torch.manual_seed(0)
    assert 0.15 < share(Player(folder, greedy=False)) < 0.40
    assert share(Player(folder, greedy=True)) > 0.9, "its best reply is almost always right"


@pytest.mark.slow
def test_its_folder_is_what_engines_and_trainers_load(folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (model.config.head_dim, model.config.eos_token_id) == (32, tokenizer.eos_token_id)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size == pytest.approx(next(m.size_bytes for m in list_models() if m.name == "tiny"), rel=0.1)


def test_training_is_a_function_of_the_recipe_and_leaves_the_callers_randomness_and_threads_alone(tmp_path):
    import torch

    def weights(name, recipe):
        (tmp_path / name).mkdir()
        shares = []
        build_tiny(tmp_path / name, shares.append, recipe)
        assert shares == [0.25, 0.5, 0.75, 1.0]
        return (tmp_path / name / "model.safetensors").read_bytes()

    torch.manual_seed(7)
    expected, num_threads = torch.rand(3), torch.get_num_threads()
    torch.manual_seed(7)
    first = weights("first", SHORT)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == num_threads
    assert weights("again", SHORT) == first
    for name, other in (("seed", replace(SHORT, seed=1)), ("noise", replace(SHORT, mistakes=NOISIER))):
        assert weights(name, other) != first
