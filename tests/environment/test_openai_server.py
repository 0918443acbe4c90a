"""The OpenAI server with the official client, and what it rejects; a script answers for the policy."""

import asyncio
import json
import threading
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from tests.environment.playing import ADD, CALL, Held, Meeting, client_of, create, first_task, opened, user
from tests.tables import rows

from marlaas.environment import Message, Reply, StopReason
from marlaas.envs.loading import Environment
from marlaas.envs.playing import play_episode
from marlaas.envs.scripted import RecordedReplies, ScriptedReplies
from marlaas.episode_state import EpisodeState
from marlaas.openai_server import OpenAIServer


def test_a_reply_ends_at_a_stop_string_which_the_client_does_not_see_and_the_conversation_keeps():
    user = {"role": "user", "content": "?"}
    with opened("add 2\nResult: 5", "add 2\nResult: 5") as (_, client, asked):
        first = create(client, user, stop=["Result:", "\n\n"]).choices[0]
        create(client, user, first.message.model_dump(exclude_none=True), user, stop="!")
    assert (first.message.content, first.finish_reason) == ("add 2\n", "stop")
    assert [(one.request.stop, one.reply.text, one.reply.stop_reason) for one in asked] == [
        (("Result:", "\n\n"), "add 2\nResult:", StopReason.MATCH),
        (("!",), "add 2\nResult: 5", StopReason.STOP),
    ]
    assert asked[1].request.parent == asked[0].reply.turn


def test_a_completion_is_one_turn_with_its_usage():
    with opened("four") as (_, client, asked):
        parts = {"role": "user", "content": [{"type": "text", "text": "2 "}, {"type": "text", "text": "+ 2"}]}
        answer = create(client, {"role": "developer", "content": "be short"}, parts, max_completion_tokens=7)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("four", "stop")
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 4 + answer.usage.prompt_tokens)
    (one,) = asked
    assert one.request.append == (Message("system", "be short"), Message("user", "2 + 2"))
    assert (one.request.parent, one.request.max_tokens, one.request.tools) == (None, 7, None)


def test_messages_go_on_where_their_beginning_ended_unless_they_were_rewritten():
    with opened("a", "b", "c") as (_, client, asked):
        messages: list[Any] = [user("one")]
        for text in ("two", "three"):
            messages += [create(client, *messages).choices[0].message, user(text)]
        create(client, *messages)
    assert [one.request.parent for one in asked] == [None, 0, 1]
    assert [one.request.append for one in asked] == [(Message("user", text),) for text in ("one", "two", "three")]
    with opened("a ", "b") as (_, client, asked):
        reply = create(client, user("one")).choices[0].message.content
        create(client, user("one"), {"role": "assistant", "content": reply.strip()}, user("two"))
    assert asked[1].request.parent is None
    assert asked[1].request.append == (Message("user", "one"), Message("assistant", "a"), Message("user", "two"))


def test_a_message_that_is_continued_goes_on_however_a_client_sends_it_back():
    with opened("b", "c", "d") as (_, client, asked):
        begun = {"role": "assistant", "content": "a"}
        reply = create(client, user("x"), begun, extra_body={"continue_final_message": True}).choices[0].message
        create(client, user("x"), begun, reply, user("y"))
        create(client, user("x"), begun | {"content": f"a{reply.content}"}, user("z"))
    assert [one.request.parent for one in asked] == [None, 0, 0]
    assert asked[0].reply.message == "ab"


def test_the_model_is_the_agent():
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
def test_a_reply_that_was_cut_says_so(stop):
    class Cut(RecordedReplies):
        def turn(self, request):
            return Reply(CALL, stop, 5, 0, 12)

    with opened(channel=Cut(lambda _: "")) as (_, client, _):
        answer = create(client, user("x"), tools=[ADD])
    usage = answer.usage
    assert (answer.choices[0].finish_reason, usage.prompt_tokens, usage.total_tokens) == ("length", 12, 17)


def test_a_closed_server_leaves_no_thread_and_no_port():
    before = threading.active_count()
    with opened("a") as (server, client, _):
        create(client, user("x"))
        url = server.base_url
    assert threading.active_count() == before
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/models")
    with pytest.raises(RuntimeError, match="the server is not running"):
        _ = server.base_url


@pytest.mark.parametrize(("fields", "words"), rows(__file__, "requests"))
def test_what_training_could_not_reproduce_is_refused_in_words(fields, words):
    with opened("a") as (_, client, asked):
        with pytest.raises(openai.BadRequestError, match=words):
            client.chat.completions.create(**{"model": "policy", "messages": [user("x")], **fields})
        assert asked == []


def test_nobody_comes_in_without_the_episodes_key():
    with opened("a") as (server, client, asked):
        with pytest.raises(openai.AuthenticationError):
            create(client.with_options(api_key="sk-other"), user("x"))
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{server.base_url}/models")
    with opened("a") as (other, _, _):
        assert other.api_key != server.api_key
    assert asked == []


def test_what_breaks_behind_the_server_is_told_and_not_asked_again():
    class Broken(RecordedReplies):
        def turn(self, request):
            self.num_tools += 1
            raise EOFError("the supervisor is gone")

    channel = Broken(lambda _: "")
    broken = pytest.raises(openai.InternalServerError, match="the supervisor is gone")
    with opened(channel=channel) as (_, client, _), broken:
        create(client, user("x"))
    assert channel.num_tools == 1


def served(channel, talk, *agents: str, is_strict=False):
    async def run(server):
        async with AsyncOpenAI(base_url=server.base_url, api_key=server.api_key) as client:
            return await talk(client)

    with OpenAIServer(EpisodeState(agents or ("a", "b"), channel, is_strict=is_strict)) as server:
        return asyncio.run(run(server))


async def two_turns(client, agent):
    messages: list[Any] = [user(agent)]
    for text in ("and", "end"):
        reply = (await client.chat.completions.create(model=agent, messages=messages)).choices[0].message
        messages += [reply, user(text)]
    return [messages[1].content, messages[3].content]


def test_requests_of_an_asynchronous_job_are_sampled_at_the_same_time():
    """An agent's names count its own turns, so they do not depend on the pace of other agents."""
    channel = Meeting(2)

    async def both(client):
        return await asyncio.gather(two_turns(client, "a"), two_turns(client, "b"))

    assert served(channel, both) == [["a0", "a1"], ["b0", "b1"]]
    assert channel.numbers() == {"a": [(0, None), (1, 0)], "b": [(0, None), (1, 0)]}


def test_in_a_strict_job_a_request_beside_another_one_is_refused_in_words():
    channel = Held()

    async def both(client):
        first = asyncio.create_task(client.chat.completions.create(model="a", messages=[user("x")]))
        assert await asyncio.to_thread(channel.asked.acquire, timeout=30)
        for agent in ("a", "b"):
            with pytest.raises(openai.BadRequestError, match="two turns were asked for at the same time") as caught:
                await client.chat.completions.create(model=agent, messages=[user("x")])
            assert caught.value.code == "not_allowed"
        channel.may_answer.set()
        await first
        return await client.chat.completions.create(model="b", messages=[user("x")])

    assert served(channel, both, is_strict=True).choices[0].message.content == "b0"
    assert channel.numbers() == {"a": [(0, None)], "b": [(0, None)]}


@pytest.mark.parametrize("is_strict", [True, False])
def test_several_choices_are_sampled_at_the_same_time_in_the_order_of_their_numbers(is_strict):
    async def ask(client):
        answer = await client.chat.completions.create(model="a", messages=[user("x")], n=3)
        return [choice.message.content for choice in answer.choices]

    assert served(Meeting(3), ask, is_strict=is_strict) == ["a0", "a1", "a2"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_answered(stream):
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


def test_a_call_that_a_client_printed_anew_is_the_same_and_none_is_looked_for_without_tools():
    with opened(CALL, "3") as (_, client, asked):
        (call,) = create(client, user("1 + 2"), tools=[ADD]).choices[0].message.tool_calls
        again = call.model_dump()
        again["function"]["arguments"] = json.dumps({"a": 1, "b": 2}, indent=2)
        said = {"role": "assistant", "content": None, "tool_calls": [again]}
        create(client, user("1 + 2"), said, user("go on"), tools=[ADD])
    assert asked[1].request.parent == 0
    with opened(CALL, CALL) as (_, client, _):
        assert create(client, user("x")).choices[0].message.content == CALL
        assert create(client, user("x"), tools=[ADD], tool_choice="none").choices[0].message.content == CALL


@pytest.mark.parametrize(
    ("reply", "names"), [*rows(__file__, "calls"), *((text, None) for text in rows(__file__, "texts"))]
)
def test_calls_are_read_and_what_is_no_call_is_text(reply, names):
    with opened(reply) as (_, client, _):
        choice = create(client, user("x"), tools=[ADD]).choices[0]
    calls = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == (("tool_calls", None) if names else ("stop", reply))
    assert (calls and [call.function.name for call in calls]) == names


def endless(task, agent):
    with agent.openai() as server, client_of(server) as client:
        while True:
            create(client, user("on"))
            agent.reward += 0.25


def framework(task, agent):
    with agent.openai() as server, client_of(server) as client:
        create(client, user("on"))
        agent.reward += 0.5
        try:
            create(client, user("on"), n=5)
        except openai.PermissionDeniedError as error:
            raise RuntimeError(f"the chain broke: {error.code == 'turn_limit'}") from None


def asynchronous(task, agent):
    async def both(server):
        async with (
            AsyncOpenAI(base_url=server.base_url, api_key=server.api_key) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(3):
                group.create_task(client.chat.completions.create(model="policy", messages=[user("on")]))

    with agent.openai() as server:
        agent.reward = 0.5
        asyncio.run(both(server))


@pytest.mark.parametrize("code", [endless, framework, asynchronous])
def test_running_out_of_turns_ends_the_episode_scored(code):
    channel = ScriptedReplies("abcd", 2)
    outcome = play_episode(Environment(code, False), first_task(), EpisodeState(["policy"], channel))
    assert (outcome.ending, outcome.rewards) == ("max_turns", {"policy": 0.5})
    assert len(channel.asked) == (1 if code is framework else 2), "of several choices all are generated, or none"
