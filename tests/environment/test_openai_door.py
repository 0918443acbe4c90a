"""The door, with the official client; a script answers for the policy."""

import asyncio
import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from marlaas.environment import Agent, EpisodeState, Message, Reply, Split, StopReason, Task, ToolCall, TurnLimit
from marlaas.envs.loading import Environment
from marlaas.envs.playing import Outcome, play_episode
from marlaas.envs.scripted import RecordedReplies, ScriptedReplies
from marlaas.openai_door import Door

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@contextmanager
def opened(*replies: str, agents: tuple[str, ...] = ("policy",), temperature: float = 1.0) -> Iterator[Any]:
    """A door, its client, and what was asked of the agents behind it."""
    channel = ScriptedReplies(replies, max_turns=99)
    state = EpisodeState(agents, channel, temperature)
    with state.agents()[agents[0]].openai() as door, client_of(door) as client:
        yield door, client, channel.asked


def client_of(door: Door) -> OpenAI:
    return OpenAI(base_url=door.base_url, api_key=door.api_key)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def create(client: OpenAI, *messages: Any, **more: Any) -> Any:
    return client.chat.completions.create(model=more.pop("model", "policy"), messages=list(messages), **more)


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


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_answered(stream: bool) -> None:
    with opened(f"Let me see.\n{CALL}", "3") as (_, client, asked):
        if stream:
            with client.chat.completions.stream(model="policy", messages=[user("1 + 2")], tools=[ADD]) as events:
                first = events.get_final_completion().choices[0]
        else:
            first = create(client, user("1 + 2"), tools=[ADD]).choices[0]
        (call,) = first.message.tool_calls
        assert (first.finish_reason, first.message.content) == ("tool_calls", "Let me see.")
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
        said = {"role": "assistant", "content": first.message.content, "tool_calls": [call.model_dump()]}
        answer = {"role": "tool", "content": "3", "tool_call_id": call.id}
        assert create(client, user("1 + 2"), said, answer, tools=[ADD]).choices[0].message.content == "3"
    assert [one.request.parent for one in asked] == [None, 0]
    assert [one.request.tools and json.loads(one.request.tools[0]) for one in asked] == [ADD, None]
    assert asked[1].request.append == (Message("tool", "3", tool_call_id=call.id),)


def test_a_call_that_a_client_printed_anew_is_the_same_call() -> None:
    with opened(CALL, "3") as (_, client, asked):
        (call,) = create(client, user("1 + 2"), tools=[ADD]).choices[0].message.tool_calls
        again = call.model_dump()
        again["function"]["arguments"] = json.dumps({"a": 1, "b": 2}, indent=2)
        create(
            client,
            user("1 + 2"),
            {"role": "assistant", "content": None, "tool_calls": [again]},
            user("go on"),
            tools=[ADD],
        )
    assert asked[1].request.parent == 0


@pytest.mark.parametrize(
    ("reply", "names"),
    [
        (CALL, ["add"]),
        (CALL + CALL, ["add", "add"]),
        (CALL.removesuffix("</tool_call>"), ["add"]),
        ('{"name": "add", "parameters": {"a": 1}}', ["add"]),
        ('[{"name": "add", "arguments": "{}"}]', ["add"]),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', ["other"]),
    ],
)
def test_calls_are_read(reply: str, names: list[str]) -> None:
    with opened(reply) as (_, client, _):
        choice = create(client, user("x"), tools=[ADD]).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert [call.function.name for call in choice.message.tool_calls] == names


@pytest.mark.parametrize(
    "reply",
    [
        '<tool_call>{"name": "add", "arguments": {"a": </tool_call>',
        '<tool_call>{"name": "add"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>"add"</tool_call>',
        CALL + "<tool_call>",
        '{"name": "somebody", "arguments": {}}',
        '{"answer": 3}',
        "[]",
        "3",
    ],
)
def test_what_is_no_call_is_text(reply: str) -> None:
    with opened(reply) as (_, client, _):
        choice = create(client, user("x"), tools=[ADD]).choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", reply, None)


def test_calls_are_not_looked_for_without_tools_or_if_none_is_wanted() -> None:
    with opened(CALL, CALL) as (_, client, _):
        assert create(client, user("x")).choices[0].message.content == CALL
        assert create(client, user("x"), tools=[ADD], tool_choice="none").choices[0].message.content == CALL


def test_a_history_that_begins_with_calls_travels_whole() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    with opened("ok") as (_, client, asked):
        create(
            client,
            user("x"),
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "1", "tool_call_id": "c1"},
        )
    assert asked[0].request.append[1] == Message("assistant", "", tool_calls=(ToolCall("add", '{"a": 1}', "c1"),))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 0.7}, "the job samples at 1"),
        ({"top_p": 0.9}, "top_p = 0.9 is refused"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"stop": ["\n"]}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": [ADD]}, "tool_choice"),
        ({"n": 0}, "expected 1 to"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"extra_body": {"top_a": 1}}, "'top_a' is not known here"),
        ({"tools": [{"type": "web_search"}]}, "a tool is"),
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
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "content is text"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "tool call"),
        ([{"role": "user", "content": "x", "name": 3}], "name is text"),
    ],
)
def test_messages_that_are_none_are_refused(messages: list[Any], words: str) -> None:
    with opened("a") as (_, client, _), pytest.raises(openai.BadRequestError, match=words):
        create(client, *messages)


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


def test_nobody_comes_in_without_the_episodes_key() -> None:
    with opened("a") as (door, client, asked):
        with pytest.raises(openai.AuthenticationError):
            create(client.with_options(api_key="sk-other"), user("x"))
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{door.base_url}/models")
    with opened("a") as (other, _, _):
        assert other.api_key != door.api_key
    assert asked == []


def test_a_request_that_is_no_json_is_answered() -> None:
    with opened("a") as (door, _, _):
        request = urllib.request.Request(
            f"{door.base_url}/chat/completions", b"{", {"Authorization": f"Bearer {door.api_key}"}
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request)
        assert "no JSON" in json.load(caught.value)["error"]["message"]
        caught.value.close()


def play(code: Any, *replies: str, max_turns: int = 9) -> tuple[Outcome, RecordedReplies]:
    channel = ScriptedReplies(replies, max_turns)
    outcome = play_episode(Environment(code, False), Task(Split.TRAIN, 0, 7), EpisodeState(["policy"], channel))
    return outcome, channel


def endless(task: Task, agent: Agent) -> None:
    with agent.openai() as door, client_of(door) as client:
        while True:
            create(client, user("on"))
            agent.reward += 0.25


def wrapping(task: Task, agent: Agent) -> None:
    try:
        endless(task, agent)
    except TurnLimit:
        raise
    raise AssertionError


def framework(task: Task, agent: Agent) -> None:
    with agent.openai() as door, client_of(door) as client:
        create(client, user("on"))
        agent.reward += 0.5
        try:
            create(client, user("on"), n=5)
        except openai.PermissionDeniedError as error:
            raise RuntimeError(f"the chain broke: {error.code == 'turn_limit'}") from None


def asynchronous(task: Task, agent: Agent) -> None:
    async def both(door: Door) -> None:
        async with AsyncOpenAI(base_url=door.base_url, api_key=door.api_key) as client, asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(client.chat.completions.create(model="policy", messages=[user("on")]))

    with agent.openai() as door:
        agent.reward = 0.5
        asyncio.run(both(door))


def in_a_tool(task: Task, agent: Agent) -> None:
    with agent.openai() as door, client_of(door) as client:
        agent.reward = 0.5
        with agent.tool():
            while True:
                create(client, user("on"))


@pytest.mark.parametrize("code", [endless, wrapping, framework, asynchronous, in_a_tool])
def test_running_out_of_turns_ends_the_episode_scored(code: Any) -> None:
    outcome, channel = play(code, "a", "b", "c", "d", max_turns=2)
    assert (outcome.ending, outcome.rewards) == ("max_turns", {"policy": 0.5})
    assert len(channel.asked) == 2


def test_an_agent_may_handle_the_limit_itself() -> None:
    def careful(task: Task, agent: Agent) -> float:
        with agent.openai() as door, client_of(door) as client:
            try:
                create(client, user("on"), n=3)
            except openai.PermissionDeniedError:
                return 0.75
        return 0.0

    assert play(careful, "a", max_turns=1)[0].rewards == {"policy": 0.75}


def test_another_error_after_the_limit_is_the_environments() -> None:
    def careless(task: Task, agent: Agent) -> None:
        with agent.openai() as door, client_of(door) as client:
            with suppress(openai.PermissionDeniedError):
                create(client, user("on"), n=3)
            {}["missing"]

    with pytest.raises(KeyError):
        play(careless, "a", max_turns=1)


def test_what_breaks_behind_the_door_is_told_and_not_asked_again() -> None:
    class Broken(RecordedReplies):
        def turn(self, request: Any) -> Reply:
            self.num_tools += 1
            raise EOFError("the supervisor is gone")

    channel = Broken(lambda _: "")
    door = EpisodeState(["policy"], channel).agents()["policy"].openai()
    broken = pytest.raises(openai.InternalServerError, match="the supervisor is gone")
    with door, client_of(door) as client, broken:
        create(client, user("x"))
    assert channel.num_tools == 1


@pytest.mark.parametrize("stop", [StopReason.LENGTH, StopReason.CONTEXT])
def test_a_reply_that_was_cut_says_so(stop: StopReason) -> None:
    class Cut(RecordedReplies):
        def turn(self, request: Any) -> Reply:
            return Reply(CALL, stop, 5, 0, 12)

    with EpisodeState(["policy"], Cut(lambda _: "")).agents()["policy"].openai() as door, client_of(door) as client:
        answer = create(client, user("x"), tools=[ADD])
    assert (answer.choices[0].finish_reason, answer.usage.prompt_tokens, answer.usage.total_tokens) == (
        "length",
        12,
        17,
    )


def test_a_closed_door_leaves_no_thread_and_no_port() -> None:
    before = threading.active_count()
    with opened("a") as (door, client, _):
        create(client, user("x"))
        url = door.base_url
    assert threading.active_count() == before
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/models")
    with pytest.raises(RuntimeError, match="the door is closed"):
        _ = door.base_url


def test_a_client_finds_the_door_by_its_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened("a") as (door, _, _):
        for name, value in door.variables.items():
            monkeypatch.setenv(name, value)
        with OpenAI() as client:
            assert create(client, user("x")).choices[0].message.content == "a"


def test_the_door_imports_nothing_heavy() -> None:
    code = "import sys, marlaas.openai_door; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"numpy", "pydantic", "asyncio", "openai", "httpx", "torch", "transformers"} & set(modules)
