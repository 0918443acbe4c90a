"""What a turn appends to a conversation, and what its reply leaves there."""

import pytest
from tests.rollout.chats import COUNTS_MESSAGES, FORGETS_REASONING, TRIMS, bpe, reply_to, say, user

from marlaas.models.tokenizer import VOCABULARY, save_tokenizer
from marlaas_api.messages import ChatMessage, StopReason
from marlaas_worker.rollout.conversation import BadAppend, extend, read_reply
from marlaas_worker.rollout.tokenizer import PretrainedTokenizer, TokenizerUnreadable


def test_the_first_turn_is_the_rendered_template(chatml):
    prompt = extend(chatml, None, user("three plus 14"))
    assert prompt.draft.opens_segment
    rendered = "<|im_start|>user\nthree plus 14<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.ids.tolist() == chatml.encode(rendered)


def test_after_an_end_token_only_what_the_template_adds_is_appended(chatml):
    first = extend(chatml, None, user("three"))
    second = extend(chatml, reply_to(chatml, first, say(chatml, "the tool")), user("plus"))
    assert not second.draft.opens_segment
    assert second.appended.tolist() == chatml.encode("\n<|im_start|>user\nplus<|im_end|>\n<|im_start|>assistant\n")
    assert second.past.tolist() == [*first.ids.tolist(), *say(chatml, "the tool")]


def test_a_reply_cut_by_length_is_closed_by_the_template_as_prompt(chatml):
    cut = reply_to(chatml, extend(chatml, None, user("three")), chatml.encode("the to"), StopReason.LENGTH)
    prompt = extend(chatml, cut, user("plus"))
    closing = "<|im_end|>\n<|im_start|>user\nplus<|im_end|>\n<|im_start|>assistant\n"
    assert not prompt.draft.opens_segment
    assert prompt.appended.tolist() == chatml.encode(closing)


def test_generated_ids_are_kept_even_if_their_text_would_be_tokenised_otherwise(chatml):
    letter_by_letter = [token for letter in "the tool" for token in chatml.encode(letter)]
    assert letter_by_letter != chatml.encode("the tool")
    output = [*letter_by_letter, *chatml.encode("<|im_end|>")]
    prompt = extend(chatml, reply_to(chatml, extend(chatml, None, user("three")), output), user("plus"))
    assert not prompt.draft.opens_segment
    assert prompt.past.tolist()[-len(output) :] == output


def test_another_end_token_than_the_templates_opens_a_segment(chatml):
    ended = reply_to(chatml, extend(chatml, None, user("three")), say(chatml, "tool", "<|endoftext|>"))
    assert extend(chatml, ended, user("plus")).draft.opens_segment


@pytest.mark.parametrize(
    ("template", "reply", "opens"),
    [
        (FORGETS_REASONING, "hm</think>three", True),
        (FORGETS_REASONING, "three", False),
        (TRIMS, " three", True),
        (TRIMS, "three", False),
        (COUNTS_MESSAGES, "three", True),
    ],
)
def test_a_template_that_rewrites_its_past_opens_a_segment_with_a_whole_prompt(template, reply, opens):
    tokenizer = bpe(template)
    ended = reply_to(tokenizer, extend(tokenizer, None, user("plus")), say(tokenizer, reply))
    prompt = extend(tokenizer, ended, user("14"))
    assert prompt.draft.opens_segment is opens
    history = (*user("plus"), ChatMessage(role="assistant", content=reply), *user("14"))
    if opens:
        assert prompt.ids.tolist() == tokenizer.encode(tokenizer.render(history))


def test_raw_text_is_appended_verbatim(chatml):
    first = extend(chatml, None, "three plus")
    assert first.ids.tolist() == chatml.encode("three plus")
    second = extend(chatml, reply_to(chatml, first, say(chatml, " 14")), "<|im_end|> the")
    assert not second.draft.opens_segment
    assert second.appended.tolist() == chatml.encode("<|im_end|> the")


def test_chat_goes_on_after_raw_text_within_a_reply(chatml):
    cut = reply_to(chatml, extend(chatml, None, user("three")), chatml.encode("the"), StopReason.LENGTH)
    forced = reply_to(chatml, extend(chatml, cut, " answer:"), say(chatml, " 14"))
    prompt = extend(chatml, forced, user("plus"))
    assert not prompt.draft.opens_segment
    assert prompt.draft.history[1].content == "the answer: 14"


def test_chat_after_a_conversation_that_began_as_raw_text_is_refused(chatml):
    begun = reply_to(chatml, extend(chatml, None, "three"), say(chatml, "14"))
    with pytest.raises(BadAppend, match="began as raw text"):
        extend(chatml, begun, user("plus"))


def test_nothing_to_generate_from_is_refused(chatml):
    with pytest.raises(BadAppend, match="nothing to generate from"):
        extend(chatml, None, "")
    with pytest.raises(BadAppend):
        extend(chatml, None, ())


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(TokenizerUnreadable, match=str(tmp_path)):
        PretrainedTokenizer.load(str(tmp_path))


def test_a_reply_ends_with_the_tokenizers_end_token_or_with_one_of_the_models_own(tmp_path):
    save_tokenizer(tmp_path, 512)
    own = VOCABULARY["<|end|>"]
    assert PretrainedTokenizer.load(str(tmp_path)).end_ids == {own}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert PretrainedTokenizer.load(str(tmp_path)).end_ids == {own, 7, 9}


def test_the_reply_has_no_end_token_but_keeps_what_was_cut(chatml):
    assert read_reply(chatml, say(chatml, "the tool"), StopReason.STOP) == "the tool"
    assert read_reply(chatml, chatml.encode("the to"), StopReason.LENGTH) == "the to"
    assert read_reply(chatml, [*chatml.encode("<|im_start|>"), *say(chatml, "a")], StopReason.STOP) == "a"


def test_room_counts_what_was_and_what_is_appended(tiny):
    first = extend(tiny, None, user("abc"))
    assert first.room(10) == 10 - len(tiny.encode("<|user|>abc<|end|><|assistant|>"))
    overflow = reply_to(tiny, first, [], StopReason.CONTEXT)
    assert overflow.full
    assert extend(tiny, overflow, "x").room(10_000) == 0
