"""What a chat template does to the past is known beforehand; tools are part of it."""

import pytest
from tests.rollout.chats import CHATML, COUNTS_MESSAGES, FORGETS_REASONING, TRIMS, bpe, reply_to, say, user

from marlaas_api.messages import ChatMessage, ToolCallMessage
from marlaas_worker.rollout.conversation import BadAppend, extend
from marlaas_worker.rollout.templates import rewritten


def test_a_template_says_itself_why_it_refuses():
    with pytest.raises(BadAppend, match="only users"):
        extend(bpe("{{ raise_exception('only users') }}"), None, user("three"))
    with pytest.raises(BadAppend, match="no chat template"):
        extend(bpe(None), None, user("three"))


@pytest.mark.parametrize(
    ("template", "num_found", "words"),
    [
        (CHATML, 0, ""),
        (FORGETS_REASONING, 1, "reasoning"),
        (TRIMS, 1, "spaces"),
        (COUNTS_MESSAGES, 4, "any reply"),
        (None, 0, ""),
    ],
)
def test_a_template_that_rewrites_its_past_is_told_beforehand(template, num_found, words):
    found = rewritten(bpe(template))
    assert len(found) == num_found
    assert words in " ".join(found)


def test_a_template_that_rewrites_the_reply_before_the_last_is_told_as_well():
    keeps_last = CHATML.replace("m.content", "(m.content if loop.index > messages | length - 2 else m.content | upper)")
    assert "any reply" in rewritten(bpe(keeps_last))


def test_templates_of_the_builtin_models_keep_their_past(tiny):
    assert rewritten(tiny) == ()


SHOWS_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML.replace(
    "<|im_end|>\n{% endfor %}",
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.a }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}",
)

TOOL = '{"type": "function", "function": {"name": "add", "parameters": {}}}'


def test_tools_are_shown_from_when_they_are_given_and_others_are_another_past():
    tokenizer = bpe(SHOWS_TOOLS)
    first = extend(tokenizer, None, user("three"), (TOOL,))
    assert first.draft.text.startswith('[{"type": "function"')
    said = reply_to(tokenizer, first, say(tokenizer, '<tool_call>{"name": "add"}</tool_call>'))
    same = extend(tokenizer, said, user("plus"))
    assert (same.draft.opens_segment, same.draft.tools) == (False, (TOOL,))
    assert extend(tokenizer, said, user("plus"), (TOOL,)).ids.tolist() == same.ids.tolist()
    without = extend(tokenizer, said, user("plus"), ())
    assert without.draft.opens_segment
    assert not without.draft.text.startswith("[")


def test_calls_that_were_written_are_rendered_with_arguments_as_an_object():
    call = ToolCallMessage(name="add", arguments='{"a": 14}', id="c1")
    written = ChatMessage(role="assistant", content="", tool_calls=(call,))
    answer = ChatMessage(role="tool", content="3", tool_call_id="c1")
    assert "<tool_call>14</tool_call>" in extend(bpe(SHOWS_TOOLS), None, (*user("x"), written, answer)).draft.text


def test_a_template_that_shows_no_tools_refuses_them(chatml):
    with pytest.raises(BadAppend, match="shows no tools"):
        extend(chatml, None, user("three"), (TOOL,))
    with pytest.raises(BadAppend, match="refuses these messages"):
        extend(bpe(SHOWS_TOOLS), None, user("three"), ("{",))
