"""How each model family's messages become a prompt, and its reply's tokens reasoning, content and tool calls."""

import json
from pathlib import Path

import pytest
import yaml
from tests.rollout.chats import bpe, reply_to, user
from tests.tables import rows

from marlaas.tool_calls import chatml_parts
from marlaas_api.messages import ChatMessage, StopReason
from marlaas_worker.rollout.conversation import extend
from marlaas_worker.rollout.renderer import TemplateRefused
from marlaas_worker.rollout.replies import read

DATA = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text(encoding="utf-8"))
FAMILIES = DATA["families"]
TOOLS = tuple(map(json.dumps, DATA["defaults"]["tools"]))


def made(name):
    case = FAMILIES[name]
    return bpe(case["template"], case["special"], case.get("added", ()), case["end"])


def calls_of(parts):
    return [[call.name, call.arguments] for call in parts.tool_calls]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_reply_is_read_and_its_past_is_rendered_again(name):
    case, tokenizer = FAMILIES[name], made(name)
    assert tokenizer.renderer.family.name == case["family"]
    tools = TOOLS if case.get("shows_tools", True) else None
    prompt = extend(tokenizer, None, user(DATA["defaults"]["user"]), tools)
    assert prompt.draft.text == case["prompt"]
    output = tokenizer.encode(case["reply"])
    assert tokenizer.token_text(output[-1]) == case["end"], "the reply ends with one token"
    spoken = case["reply"].removesuffix(case["end"])
    reply = read(tokenizer, prompt, output, StopReason.STOP)
    assert reply.text == case.get("text", spoken)
    if reply.parts is None:
        assert not {"raw", "reasoning", "content", "calls"} & case.keys()
    else:
        expected = (case.get("reasoning", ""), case.get("content", reply.text), case.get("raw", spoken))
        assert (reply.parts.reasoning, reply.parts.content, reply.parts.raw) == expected
        assert calls_of(reply.parts) == case.get("calls", [])
    role = "user" if case.get("asks") or "text" in case else "tool"
    answer = ChatMessage(role=role, content=DATA["defaults"]["answer"])
    following = extend(tokenizer, reply_to(tokenizer, prompt, output), (answer,))
    assert (following.draft.opens_segment, following.draft.fresh) == (case.get("opens", False), case["next"])


@pytest.mark.parametrize(("name", "text", "reasoning", "content"), DATA["malformed"])
def test_a_malformed_call_is_content_and_a_cut_reply_is_read_as_far_as_it_goes(name, text, reasoning, content):
    tokenizer = made(name)
    prompt = extend(tokenizer, None, user("x"), TOOLS if FAMILIES[name].get("shows_tools", True) else None)
    reply = read(tokenizer, prompt, tokenizer.encode(text), StopReason.LENGTH)
    parts = ("", reply.text) if reply.parts is None else (reply.parts.reasoning, reply.parts.content)
    assert (reply.text, *parts) == (text, reasoning, content)


@pytest.mark.parametrize(("name", "tools"), [("Hermes", TOOLS), ("Qwen3", None), ("plain ChatML", None)])
@pytest.mark.parametrize("more", ["", "\nDone."])
def test_a_call_that_the_environment_has_begun_is_one_of_the_replys_calls(name, tools, more):
    tokenizer, begun = made(name), 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1,'
    asked = (*user("1 + 2?"), ChatMessage(role="assistant", content=begun))
    reply = ' "b": "2"}}\n</tool_call>' + more
    prompt = extend(tokenizer, None, asked, tools)
    read_as = read(tokenizer, prompt, tokenizer.encode(f"{reply}<|im_end|>"), StopReason.STOP)
    assert (read_as.text, read_as.parts.raw, read_as.parts.content.strip()) == (reply, reply, more.strip())
    assert calls_of(read_as.parts) == [["add", '{"a": 1, "b": "2"}']]
    cut = read(tokenizer, prompt, tokenizer.encode(' "b": '), StopReason.LENGTH)
    assert cut.parts is None or not cut.parts.tool_calls


ELSEWHERE = str(Path(__file__).parents[1] / "environment" / "test_openai_server.py")
REPLIES = ["plain", "<think>a</think> b", *(text for text, _ in rows(ELSEWHERE, "calls"))]


@pytest.mark.parametrize("text", [*REPLIES, *rows(ELSEWHERE, "texts")])
def test_a_written_reply_is_read_as_that_of_a_chatml_model(text):
    tokenizer = made("plain ChatML")
    parts = tokenizer.parts(tokenizer.encode(text), "", TOOLS)
    written = chatml_parts(text, {"add"})
    assert [[call.name, call.arguments] for call in written.tool_calls] == ([] if parts is None else calls_of(parts))
    read_as = ("", text) if parts is None else (parts.reasoning, parts.content)
    assert (written.reasoning, written.content) == read_as


def test_a_template_whose_special_tokens_nothing_reads_is_refused_unless_its_tokenizer_says_how():
    with pytest.raises(TemplateRefused, match=r"the special tokens <\|endoftext\|> into .* Put a `response_template`"):
        bpe(DATA["unread"]).check_template()
    fields = {"thinking": {"open": "<|endoftext|>", "close": "<|im_start|>"}, "content": {}}
    own = {"start_anchor": "a:", "fields": fields}
    tokenizer = bpe(DATA["unread"], response_template=own)
    tokenizer.check_template()
    prompt = extend(tokenizer, None, user("x"))
    text = "<|endoftext|>hm<|im_start|>three"
    reply = read(tokenizer, prompt, tokenizer.encode(f"{text}<|im_end|>"), StopReason.STOP)
    assert (reply.text, reply.parts.reasoning, reply.parts.content) == (text, "hm", "three")
    bpe(None).check_template()
