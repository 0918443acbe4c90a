"""What a turn appends to a conversation, what its reply leaves there, and what a chat template does to the past."""

import copy

import pytest
from tests.rollout.chats import TEMPLATES, assistant, bpe, reply_to, say, user
from tests.tables import rows
from tokenizers.processors import TemplateProcessing

from marlaas_api.messages import ChatMessage, StopReason, ToolCallMessage
from marlaas_worker.rollout.conversation import BadAppend, extend, read_reply
from marlaas_worker.rollout.demonstrated import demonstrated
from marlaas_worker.rollout.templates import rewritten
from marlaas_worker.rollout.tokenizer import PretrainedTokenizer, TokenizerUnreadable

TOOL = '{"type": "function", "function": {"name": "add", "parameters": {}}}'


def opened(tokenizer, append="three"):
    return extend(tokenizer, None, user(append))


@pytest.mark.parametrize(("said", "stop", "appended"), rows(__file__, "first_replies"))
def test_the_first_turn_is_the_whole_template_and_later_ones_what_it_adds(chatml, said, stop, appended):
    """A reply that was cut by its length is closed by the template."""
    first, output = opened(chatml), chatml.encode(said)
    assert first.draft.opens_segment
    assert first.ids.tolist() == chatml.encode("<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n")
    second = extend(chatml, reply_to(chatml, first, output, StopReason(stop)), user("plus"))
    assert not second.draft.opens_segment
    assert second.appended.tolist() == chatml.encode(appended)
    assert second.past.tolist() == [*first.ids.tolist(), *output]
    another_end = reply_to(chatml, first, say(chatml, "tool", "<|endoftext|>"))
    assert extend(chatml, another_end, user("plus")).draft.opens_segment


def test_raw_text_is_appended_verbatim_and_chat_goes_on_after_it_only_within_a_reply(chatml):
    first = extend(chatml, None, "three plus")
    assert first.ids.tolist() == chatml.encode("three plus")
    begun = reply_to(chatml, first, say(chatml, " 14"))
    second = extend(chatml, begun, "<|im_end|> the")
    assert not second.draft.opens_segment
    assert second.appended.tolist() == chatml.encode("<|im_end|> the")
    with pytest.raises(BadAppend, match="began as raw text"):
        extend(chatml, begun, user("plus"))
    cut = reply_to(chatml, opened(chatml), chatml.encode("the"), StopReason.LENGTH)
    prompt = extend(chatml, reply_to(chatml, extend(chatml, cut, " answer:"), say(chatml, " 14")), user("plus"))
    assert not prompt.draft.opens_segment
    assert prompt.draft.history[1].content == "the answer: 14"


def test_raw_text_begins_with_what_the_tokenizers_own_encoding_puts_there_and_only_once(chatml):
    made = copy.deepcopy(chatml._tokenizer)
    marked = [("<|endoftext|>", 0), ("<|im_end|>", 2)]
    made.backend_tokenizer.post_processor = TemplateProcessing("<|endoftext|> $A <|im_end|>", special_tokens=marked)
    tokenizer = PretrainedTokenizer(made)
    first = extend(tokenizer, None, "three")
    assert first.ids.tolist() == [0, *chatml.encode("three")]
    assert extend(tokenizer, None, "<|endoftext|>three").ids.tolist() == first.ids.tolist()
    later = extend(tokenizer, reply_to(tokenizer, first, say(chatml, "14")), "plus")
    assert later.appended.tolist() == chatml.encode("plus")
    assert opened(tokenizer).ids.tolist() == opened(chatml).ids.tolist()


@pytest.mark.parametrize(("template", "reply", "opens"), rows(__file__, "rewrites"))
def test_a_template_that_rewrites_its_past_opens_a_segment_with_a_whole_prompt(template, reply, opens):
    tokenizer = bpe(TEMPLATES[template])
    ended = reply_to(tokenizer, extend(tokenizer, None, user("plus")), say(tokenizer, reply))
    prompt = extend(tokenizer, ended, user("14"))
    assert prompt.draft.opens_segment is opens
    history = (*user("plus"), ChatMessage(role="assistant", content=reply), *user("14"))
    if opens:
        assert prompt.ids.tolist() == tokenizer.encode(tokenizer.render(history))


@pytest.mark.parametrize(("template", "prefill", "end", "opening", "reply", "opens"), rows(__file__, "openings"))
def test_a_reply_begins_with_what_the_template_or_the_environment_wrote(template, prefill, end, opening, reply, opens):
    tokenizer = bpe(TEMPLATES[template])
    first = extend(tokenizer, None, (*user("plus"), *(() if prefill is None else (assistant(prefill),))))
    assert first.draft.text.partition("<|im_start|>assistant\n")[2] == end
    assert first.ids.tolist() == tokenizer.encode(first.draft.text)
    assert first.draft.opening == opening
    second = extend(tokenizer, reply_to(tokenizer, first, say(tokenizer, reply)), user("14"))
    assert second.draft.history[1].content == opening + reply
    assert second.draft.opens_segment is opens


@pytest.mark.parametrize(("template", "last", "words"), rows(__file__, "beginnings"))
def test_a_beginning_that_the_template_cannot_continue_is_refused(template, last, words):
    with pytest.raises(BadAppend, match=words):
        extend(bpe(TEMPLATES[template]), None, (*user("plus"), assistant(**last)))


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(TokenizerUnreadable, match=str(tmp_path)):
        PretrainedTokenizer.load(str(tmp_path))


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


@pytest.mark.parametrize(("template", "num_found", "words"), rows(__file__, "told_rewrites"))
def test_a_template_that_rewrites_its_past_is_told_beforehand(template, num_found, words):
    found = rewritten(bpe(TEMPLATES.get(template)))
    assert len(found) == num_found
    assert words in " ".join(found)


def test_tools_are_shown_from_when_they_are_given_and_others_are_another_past():
    tokenizer = bpe(TEMPLATES["SHOWS_TOOLS"])
    first = extend(tokenizer, None, user("three"), (TOOL,))
    assert first.draft.text.startswith('[{"type": "function"')
    said = reply_to(tokenizer, first, say(tokenizer, '<tool_call>{"name": "add"}</tool_call>'))
    same = extend(tokenizer, said, user("plus"))
    assert (same.draft.opens_segment, same.draft.tools) == (False, (TOOL,))
    assert extend(tokenizer, said, user("plus"), (TOOL,)).ids.tolist() == same.ids.tolist()
    without = extend(tokenizer, said, user("plus"), ())
    assert (without.draft.opens_segment, without.draft.text.startswith("[")) == (True, False)
    call = ToolCallMessage(name="add", arguments='{"a": 14}', id="c1")
    written = ChatMessage(role="assistant", content="", tool_calls=(call,))
    answer = ChatMessage(role="tool", content="3", tool_call_id="c1")
    assert "<tool_call>14</tool_call>" in extend(tokenizer, None, (*user("x"), written, answer)).draft.text


@pytest.mark.parametrize(("template", "tools", "words"), rows(__file__, "template_refusals"))
def test_a_template_says_itself_why_it_refuses(template, tools, words):
    with pytest.raises(BadAppend, match=words):
        extend(bpe(TEMPLATES.get(template, template)), None, user("three"), tuple(tools))


@pytest.mark.parametrize(("template", "reply", "text"), rows(__file__, "demonstrations"))
def test_a_demonstrated_reply_is_what_the_policy_would_have_generated(template, reply, text):
    tokenizer = bpe(TEMPLATES[template])
    given = ChatMessage(role="assistant", **reply)
    if text is None:
        with pytest.raises(BadAppend, match=r"in another way|contains the end token <\|im_end\|>"):
            demonstrated(tokenizer, None, user("plus"), None, given)
        return
    first = demonstrated(tokenizer, None, user("plus"), None, given)
    assert list(first.completion.output_ids) == [*tokenizer.encode(text), *tokenizer.encode("<|im_end|>")]
    assert first.prompt.ids.tolist() == extend(tokenizer, None, user("plus")).ids.tolist()
    said = reply_to(tokenizer, first.prompt, first.completion.output_ids)
    second = demonstrated(tokenizer, said, user("14"), None, assistant("the"))
    assert second.prompt.ids.tolist() == extend(tokenizer, said, user("14")).ids.tolist()
