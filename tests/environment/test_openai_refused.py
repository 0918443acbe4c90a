"""Requests that the OpenAI server rejects, and the errors that the client receives."""

import json
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest
from tests.environment.servers import ADD, client_of, create, opened, user

from marlaas.environment import EpisodeState, Reply
from marlaas.envs.scripted import RecordedReplies


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


def test_fields_that_change_nothing_are_welcome() -> None:
    with opened("a", temperature=0.7) as (_, client, asked):
        create(
            client,
            user("x"),
            temperature=0.7,
            top_p=1,
            frequency_penalty=0,
            stop=None,
            seed=3,
            user="me",
            extra_body={"top_k": -1, "min_p": 0.0},
        )
    assert len(asked) == 1


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


def test_a_request_that_is_no_json_is_answered() -> None:
    with opened("a") as (server, _, _):
        request = urllib.request.Request(
            f"{server.base_url}/chat/completions", b"{", {"Authorization": f"Bearer {server.api_key}"}
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request)
        assert "not JSON" in json.load(caught.value)["error"]["message"]
        caught.value.close()


def test_what_breaks_behind_the_server_is_told_and_not_asked_again() -> None:
    class Broken(RecordedReplies):
        def turn(self, request: Any) -> Reply:
            self.num_tools += 1
            raise EOFError("the supervisor is gone")

    channel = Broken(lambda _: "")
    server = EpisodeState(["policy"], channel).agents()["policy"].openai()
    broken = pytest.raises(openai.InternalServerError, match="the supervisor is gone")
    with server, client_of(server) as client, broken:
        create(client, user("x"))
    assert channel.num_tools == 1
