"""The tasks of the builtin curriculum, the demonstrations that the tiny model is trained on, and its tokenizer."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tables import data

from marlaas.models.curriculum import calculator_task, evaluate, requested_expression, reverse_task, tool_reply
from marlaas.models.demonstrations import NO_MISTAKES, calculator_demonstration, reverse_demonstration
from marlaas.models.tokenizer import END, ROLES, UNKNOWN, VOCABULARY, TemplateMessage, encode, save_tokenizer
from marlaas_api.names import Split

SEEDS = range(400)
REQUESTED, VALUES = data(__file__, "requested"), data(__file__, "values")
TEXT = st.text(alphabet=[token for token in VOCABULARY if len(token) == 1], max_size=30)
CONVERSATION = st.lists(st.builds(TemplateMessage, st.sampled_from(ROLES), TEXT), min_size=1, max_size=6)


def test_a_seed_names_the_same_task_for_ever():
    assert [reverse_task(Split.TRAIN, seed).word for seed in (0, 1, 2**63 - 1)] == ["ynbi", "szy", "vuez"]
    assert [calculator_task(Split.EVAL, seed).expression for seed in (0, 1, 2**63 - 1)] == ["34*63", "64-61", "30+72"]


def test_held_out_tasks_are_never_trained_on():
    for draw in (reverse_task, calculator_task):
        trained = {draw(Split.TRAIN, seed).prompt for seed in SEEDS}
        held_out = {draw(Split.EVAL, seed).prompt for seed in SEEDS}
        assert not trained & held_out
        assert len(held_out) > 300


def test_what_a_reply_asks_the_calculator_which_knows_three_operations_and_no_code():
    assert {reply: requested_expression(reply) for reply in REQUESTED} == REQUESTED
    for expression, value in VALUES.items():
        assert evaluate(expression) == value, expression
        assert tool_reply(expression) == ("error" if value is None else str(value))


def test_without_mistakes_every_reply_is_right():
    for seed in range(100):
        word, sum_ = reverse_task(Split.TRAIN, seed), calculator_task(Split.TRAIN, seed)
        said = (("user", word.prompt), ("assistant", word.answer))
        assert reverse_demonstration(seed, NO_MISTAKES) == [TemplateMessage(*one) for one in said]
        asked, told = (("user", sum_.prompt), ("assistant", sum_.call)), ("tool", sum_.answer)
        said = (*asked, told, ("assistant", sum_.answer))
        assert calculator_demonstration(seed, NO_MISTAKES) == [TemplateMessage(*one) for one in said]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, 512)
    return AutoTokenizer.from_pretrained(folder)


def render(tokenizer, conversation, prompt=False):
    messages = [{"role": message.role, "content": message.content} for message in conversation]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    return list(tokenizer.encode(text, add_special_tokens=False))


@given(text=TEXT)
def test_a_character_is_a_token_and_nothing_is_lost(tokenizer, text):
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


@given(conversation=CONVERSATION)
def test_pretraining_reads_what_the_template_writes_message_by_message(tokenizer, conversation):
    assert render(tokenizer, conversation) == encode(conversation)[0]
    one_by_one = [token for message in conversation for token in render(tokenizer, [message])]
    assert render(tokenizer, conversation) == one_by_one


@given(conversation=CONVERSATION, reply=TEXT)
def test_a_generated_turn_is_the_rendered_one(tokenizer, conversation, reply):
    generated = [*tokenizer.encode(reply), tokenizer.eos_token_id]
    whole = render(tokenizer, [*conversation, TemplateMessage("assistant", reply)])
    assert render(tokenizer, conversation, prompt=True) + generated == whole


def test_an_assistant_writes_its_words_and_the_end_of_its_turn_and_other_characters_are_one_unknown_token(tokenizer):
    ids, written = encode([TemplateMessage("user", "hé"), TemplateMessage("assistant", "yo")])
    assert [index for index, mine in zip(ids, written, strict=True) if mine] == [VOCABULARY[t] for t in ("y", "o", END)]
    assert ids[2] == VOCABULARY[UNKNOWN]
    assert tokenizer.encode("aé☃b") == [VOCABULARY[t] for t in ("a", UNKNOWN, UNKNOWN, "b")]


def test_special_tokens_are_single_and_the_end_of_turn_ends_generation(tokenizer):
    for token in (END, *(f"<|{role}|>" for role in ROLES)):
        assert tokenizer.encode(token) == [VOCABULARY[token]]
    assert (tokenizer.eos_token, tokenizer.bos_token) == (END, None)
    assert tokenizer.decode(tokenizer.encode(f"a{END}"), skip_special_tokens=True) == "a"
