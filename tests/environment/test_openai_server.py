"""The OpenAI server with the official client, and what it rejects; a script answers for the policy."""

import subprocess
import sys
import threading
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest
from tests.environment.servers import ADD, CALL, create, opened, user

from marlaas.environment import Message, Reply, StopReason
from marlaas.envs.scripted import RecordedReplies


def test_a_completion_is_one_turn_with_its_usage() -> None:
    with opened("four") as (_, client, asked):
        parts = {"role": "user", "content": [{"type": "text", "text": "2 "}, {"type": "text", "text": "+ 2"}]}
        answer = create(client, {"role": "developer", "content": "be short"}, parts, max_completion_tokens=7)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("four", "stop")
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 4 + answer.usage.prompt_tokens)
    (one,) = asked
    assert one.request.append == (Message("system", "be short"), Message("user", "2 + 2"))
    assert (one.request.parent, one.request.max_tokens, one.request.tools) == (None, 7, None)


def test_a_stream_says_the_same() -> None:
    with opened("four") as (_, client, _):
        chunks = list(create(client, user("2 + 2"), stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "four"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices] == [None, "stop"]
    assert chunks[-1].usage.completion_tokens == 4


def test_the_whole_list_of_messages_goes_on_where_its_beginning_ended() -> None:
    with opened("a", "b", "c") as (_, client, asked):
        messages: list[Any] = [user("one")]
        for text in ("two", "three"):
            messages += [create(client, *messages).choices[0].message, user(text)]
        create(client, *messages)
    assert [one.request.parent for one in asked] == [None, 0, 1]
    assert [one.request.append for one in asked] == [(Message("user", text),) for text in ("one", "two", "three")]


def test_what_the_agent_rewrote_is_a_new_conversation() -> None:
    with opened("a ", "b") as (_, client, asked):
        reply = create(client, user("one")).choices[0].message.content
        create(client, user("one"), {"role": "assistant", "content": reply.strip()}, user("two"))
    assert asked[1].request.parent is None
    assert asked[1].request.append == (Message("user", "one"), Message("assistant", "a"), Message("user", "two"))


def test_the_model_is_the_agent() -> None:
    with opened("p", "s", "s2", agents=("proposer", "solver")) as (_, client, asked):
        create(client, user("x"), model="proposer")
        reply = create(client, user("x"), model="solver").choices[0].message
        create(client, user("x"), reply, user("y"), model="solver")
        assert [model.id for model in client.models.list()] == ["proposer", "solver"]
        assert client.models.retrieve("solver").id == "solver"
        with pytest.raises(openai.NotFoundError, match="agents are proposer, solver"):
            create(client, user("x"), model="gpt-4o")
    turns = [(one.request.agent, one.request.parent) for one in asked]
    assert turns == [("proposer", None), ("solver", None), ("solver", 0)]


@pytest.mark.parametrize("stop", [StopReason.LENGTH, StopReason.CONTEXT])
def test_a_reply_that_was_cut_says_so(stop: StopReason) -> None:
    class Cut(RecordedReplies):
        def turn(self, request: Any) -> Reply:
            return Reply(CALL, stop, 5, 0, 12)

    with opened(channel=Cut(lambda _: "")) as (_, client, _):
        answer = create(client, user("x"), tools=[ADD])
    usage = answer.usage
    assert (answer.choices[0].finish_reason, usage.prompt_tokens, usage.total_tokens) == ("length", 12, 17)


def test_a_closed_server_leaves_no_thread_and_no_port() -> None:
    before = threading.active_count()
    with opened("a") as (server, client, _):
        create(client, user("x"))
        url = server.base_url
    assert threading.active_count() == before
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/models")
    with pytest.raises(RuntimeError, match="the server is not running"):
        _ = server.base_url


def test_the_server_imports_nothing_heavy() -> None:
    code = "import sys, marlaas.openai_server; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"numpy", "pydantic", "asyncio", "openai", "httpx", "torch", "transformers"} & set(modules)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 0.7}, "the job samples at 1"),
        ({"top_p": 0.9}, "top_p = 0.9 is not supported"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"stop": ["\n"]}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": [ADD]}, "tool_choice"),
        ({"n": 0}, "expected 1 to"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"extra_body": {"top_a": 1}}, "unknown field 'top_a'"),
        ({"tools": [{"type": "web_search"}]}, "a tool must be"),
    ],
)
def test_what_training_could_not_reproduce_is_refused_in_words(fields: dict[str, Any], words: str) -> None:
    with opened("a") as (_, client, asked):
        with pytest.raises(openai.BadRequestError, match=words):
            create(client, user("x"), **fields)
        assert asked == []


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ([{"role": "boss", "content": "x"}], "role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "content must be text"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "tool call"),
        ([{"role": "user", "content": "x", "name": 3}], "name must be text"),
    ],
)
def test_messages_that_are_none_are_refused(messages: list[Any], words: str) -> None:
    with opened("a") as (_, client, _), pytest.raises(openai.BadRequestError, match=words):
        create(client, *messages)


def test_nobody_comes_in_without_the_episodes_key() -> None:
    with opened("a") as (server, client, asked):
        with pytest.raises(openai.AuthenticationError):
            create(client.with_options(api_key="sk-other"), user("x"))
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{server.base_url}/models")
    with opened("a") as (other, _, _):
        assert other.api_key != server.api_key
    assert asked == []


def test_what_breaks_behind_the_server_is_told_and_not_asked_again() -> None:
    class Broken(RecordedReplies):
        def turn(self, request: Any) -> Reply:
            self.num_tools += 1
            raise EOFError("the supervisor is gone")

    channel = Broken(lambda _: "")
    broken = pytest.raises(openai.InternalServerError, match="the supervisor is gone")
    with opened(channel=channel) as (_, client, _), broken:
        create(client, user("x"))
    assert channel.num_tools == 1
