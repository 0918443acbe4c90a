"""The OpenAI server with the official client; a script answers for the policy."""

import subprocess
import sys
import threading
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest
from openai import OpenAI
from tests.environment.servers import ADD, CALL, client_of, create, opened, user

from marlaas.environment import EpisodeState, Message, Reply, StopReason
from marlaas.envs.scripted import RecordedReplies


def test_a_completion_is_one_turn_with_its_usage() -> None:
    with opened("four") as (_, client, asked):
        answer = create(client, {"role": "developer", "content": "be short"}, user("2 + 2"), max_completion_tokens=7)
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


def test_an_earlier_beginning_branches() -> None:
    with opened("a", "b", "c") as (_, client, asked):
        first = [user("one"), create(client, user("one")).choices[0].message]
        create(client, *first, user("two"))
        create(client, *first, user("three"))
    assert [one.request.parent for one in asked] == [None, 0, 0]


def test_several_choices_are_siblings_and_each_goes_on() -> None:
    with opened("a", "b", "c", "d") as (_, client, asked):
        choices = create(client, user("one"), n=3).choices
        create(client, user("one"), choices[1].message, user("two"))
    assert [choice.message.content for choice in choices] == ["a", "b", "c"]
    assert [one.request.parent for one in asked] == [None, None, None, 1]


def test_choices_that_read_alike_go_on_in_their_order() -> None:
    with opened("a", "a", "b", "c", "d") as (_, client, asked):
        for choice in create(client, user("one"), n=2).choices:
            create(client, user("one"), choice.message, user("two"))
        create(client, user("one"), choice.message, user("three"))
    assert [one.request.parent for one in asked] == [None, None, 0, 1, 0]


def test_text_in_parts_is_text() -> None:
    with opened("a") as (_, client, asked):
        create(client, {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]})
    assert asked[0].request.append == (Message("user", "one two"),)


def test_the_model_is_the_agent() -> None:
    with opened("p", "s", "s2", agents=("proposer", "solver")) as (_, client, asked):
        create(client, user("x"), model="proposer")
        reply = create(client, user("x"), model="solver").choices[0].message
        create(client, user("x"), reply, user("y"), model="solver")
        assert [model.id for model in client.models.list()] == ["proposer", "solver"]
        assert client.models.retrieve("solver").id == "solver"
        with pytest.raises(openai.NotFoundError, match="agents are proposer, solver"):
            create(client, user("x"), model="gpt-4o")
    assert [(one.request.agent, one.request.parent) for one in asked] == [
        ("proposer", None),
        ("solver", None),
        ("solver", 1),
    ]


@pytest.mark.parametrize("stop", [StopReason.LENGTH, StopReason.CONTEXT])
def test_a_reply_that_was_cut_says_so(stop: StopReason) -> None:
    class Cut(RecordedReplies):
        def turn(self, request: Any) -> Reply:
            return Reply(CALL, stop, 5, 0, 12)

    with EpisodeState(["policy"], Cut(lambda _: "")).agents()["policy"].openai() as server, client_of(server) as client:
        answer = create(client, user("x"), tools=[ADD])
    assert (answer.choices[0].finish_reason, answer.usage.prompt_tokens, answer.usage.total_tokens) == (
        "length",
        12,
        17,
    )


def test_a_closed_door_leaves_no_thread_and_no_port() -> None:
    before = threading.active_count()
    with opened("a") as (server, client, _):
        create(client, user("x"))
        url = server.base_url
    assert threading.active_count() == before
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/models")
    with pytest.raises(RuntimeError, match="the server is not running"):
        _ = server.base_url


def test_a_client_finds_the_door_by_its_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened("a") as (server, _, _):
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        with OpenAI() as client:
            assert create(client, user("x")).choices[0].message.content == "a"


def test_the_door_imports_nothing_heavy() -> None:
    code = "import sys, marlaas.openai_server; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"numpy", "pydantic", "asyncio", "openai", "httpx", "torch", "transformers"} & set(modules)
