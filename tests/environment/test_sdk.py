"""The SDK: conversations, rewards, tools and their time limits, tasks, and the forms of messages and tools that `ask` takes."""

import inspect
import json
import random
import re
import subprocess
import sys
import textwrap
import time
import typing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
from tests.environment.playing import first_task
from tests.tables import data, rows
from transformers.utils import get_json_schema

import marlaas
import marlaas.environment
from marlaas.chat_messages import message_of, tool_text
from marlaas.environment import Agents, Message, Rows, Score, Split, StopReason, Task, ToolCall, TurnLimit
from marlaas.environment_types import InvalidTurn
from marlaas.envs.loading import Environment, resolve
from marlaas.envs.playing import explain, play_episode
from marlaas.envs.scripted import RecordedReplies, ScriptedReplies
from marlaas.episode_state import EpisodeState
from marlaas.scores import InvalidScore
from marlaas.time_limit import time_limit
from marlaas_api import messages
from marlaas_api.errors import InvalidInput
from marlaas_api.names import split_of


def play(code, *replies: str, agents=("policy",), max_turns=8):
    """Play a function `code(task, agent)` against replies in order; return the outcome and the channel."""
    channel = ScriptedReplies(replies, max_turns)
    environment = Environment(code, takes_all_agents=len(agents) > 1)
    return play_episode(environment, first_task(), EpisodeState(agents, channel)), channel


def example_of_the_docstring():
    found = re.search(r"\n\n(    def play.*?)\n\n(?=\S)", str(marlaas.environment.__doc__), re.DOTALL)
    return textwrap.dedent(found[1])


def test_the_example_fits_in_ten_lines_and_plays(tmp_path, monkeypatch):
    (tmp_path / "ten_lines.py").write_text(example_of_the_docstring())
    monkeypatch.syspath_prepend(str(tmp_path))
    assert len(example_of_the_docstring().splitlines()) <= 10
    environment = resolve("ten_lines:play", {}).create()

    def honest(request):
        first, second = map(int, re.findall(r"\d+", str(request.append[0])))
        return str(first + second)

    state = EpisodeState(["policy"], RecordedReplies(honest))
    assert environment.play(Task(Split.TRAIN, 3, 1), Agents(state)) == 1.0


NOT_NEEDED = "asyncio huggingface_hub nats numpy ormsgpack matplotlib openai pydantic rich torch transformers vllm yaml"


@pytest.mark.parametrize(("modules", "needed"), rows(__file__, "imports"))
def test_what_runs_beside_environments_imports_nothing_heavy(modules, needed):
    """An image with an environment of its own has neither numpy nor the worker's libraries."""
    code = f"import sys, {modules}; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not ({*NOT_NEEDED.split()} - {*needed.split()}) & {*found}


def test_the_package_has_the_names_of_the_sdk_and_no_others():
    assert StopReason is messages.StopReason
    names = {name for name, value in vars(marlaas).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert names == set(marlaas.environment.__all__)


@pytest.mark.parametrize(
    ("asks", "words"),
    [
        (lambda agent: agent.say("x", max_tokens=0), "max_tokens is 0"),
        (lambda agent: agent.say("x", stop=5), "stop is 5; expected at most 16 strings"),
        (lambda agent: agent.complete("x", stop=["y", ""]), "stop is .* of 1 to 64 characters"),
        (lambda agent: agent.complete("x", max_tokens=1.5), r"max_tokens is 1\.5"),
        (lambda agent: agent.complete(5), "text that is not empty, not 5"),
        (lambda agent: [agent.complete("x"), agent.complete("y"), agent.say("z")], "began as raw text"),
    ],
)
def test_a_turn_that_no_job_takes_is_refused_by_hand_too_also_within_a_tool(asks, words):
    def game(task, agent):
        with agent.tool():
            asks(agent)

    with pytest.raises(InvalidTurn, match=words):
        play(game, "1", "2", "3")
    assert play(lambda task, agent: float(agent.say("x", max_tokens=np.int64(3)).text), "1")[0].rewards == {"policy": 1}


def test_a_conversation_goes_on_where_it_ended_and_branches_go_on_alone():
    def talk(task, agent):
        agent.ask([Message("system", "short"), {"role": "user", "content": "one"}])
        agent.say("two", max_tokens=3)
        agent.complete("raw")
        return 0.0

    _, channel = play(talk, "a", "b", "c")
    requests = [asked.request for asked in channel.asked]
    assert [request.parent for request in requests] == [None, 0, 1]
    assert requests[0].append == (Message("system", "short"), Message("user", "one"))
    assert (requests[1].append, requests[1].max_tokens) == ((Message("user", "two"),), 3)
    assert requests[2].append == "raw"

    def branch(task, agent):
        first = agent.say("one")
        agent.say("two")
        other, again, fresh = agent.fork(), agent.fork(first), agent.begin()
        for conversation in (agent, other, again, fresh):
            conversation.say("next")
        return 0.0

    _, channel = play(branch, *"abcdef")
    assert [asked.request.parent for asked in channel.asked] == [None, 0, 1, 1, 0, None]


def earning(task, agents):
    agents["white"].reward += 1
    agents["black"].reward -= 1


def scoring_one(task, agents):
    agents["black"].reward = 0.25
    return Score({"white": 1.0}, {"moves": 4})


@pytest.mark.parametrize(
    ("game", "white", "black", "metrics"),
    [
        (lambda task, agents: 1, 1.0, 1.0, {}),  # a single number is the reward of every agent
        (earning, 1.0, -1.0, {}),  # nothing returned means what was earned
        (scoring_one, 1.0, 0.25, {"moves": 4.0}),  # a mapping leaves other agents what they earned
    ],
)
def test_agents_get_what_is_returned_or_what_they_earned(game, white, black, metrics):
    outcome, _ = play(game, agents=("white", "black"))
    assert (outcome.rewards, outcome.metrics) == ({"white": white, "black": black}, metrics)


def test_running_out_of_turns_is_scored_with_what_was_earned_unless_the_environment_handles_it():
    def endless(task, agent):
        while True:
            agent.say("on")
            agent.reward += 0.25

    def careful(task, agent):
        with pytest.raises(TurnLimit):
            endless(task, agent)
        return 0.75

    outcome, _ = play(endless, *"abcdef", max_turns=2)
    assert (outcome.ending, outcome.rewards, outcome.is_scored) == ("max_turns", {"policy": 0.5}, True)
    assert play(careful, "a")[0].rewards == {"policy": 0.75}, "an environment may handle the limit itself"


@pytest.mark.parametrize(
    ("breaks", "error"),
    [
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda: sys.exit(3), "SystemExit: 3"),
        (lambda: time.sleep(30), "TimeoutError: the tool took longer than 0.05 s"),
    ],
)
def test_a_tool_that_the_policy_breaks_or_holds_too_long_is_scored_and_its_error_is_kept(breaks, error):
    def use(task, agent):
        agent.reward = 0.1
        with agent.tool(timeout_s=0.05):
            breaks()
        return 1.0

    outcome, channel = play(use)
    assert (outcome.ending, outcome.rewards, channel.num_tools) == ("tool_error", {"policy": 0.1}, 1)
    assert (outcome.tool_error, outcome.is_scored) == (error, True)


def test_time_in_tools_is_counted_without_the_turns_in_them():
    class Slow(RecordedReplies):
        def turn(self, request):
            time.sleep(0.2)
            return super().turn(request)

    state = EpisodeState(["policy"], Slow(lambda _: "x"))
    agent = Agents(state)["policy"]
    begun = time.monotonic()
    with agent.tool(), agent.tool():
        time.sleep(0.05)
        agent.say("another agent as a tool")
    took_s = time.monotonic() - begun
    assert 0.05 <= state.tool_s <= took_s - 0.2


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (1.7e308, "from -1e[+]30 to 1e[+]30"),
        (Score(1.0, {"x": float("inf")}), "metric 'x'"),
        (Score(1.0, {"": 1.0}), "metric's name"),
        (Score(1.0, {"\x1b[2Jx": 1.0}), "printable characters"),
        (Score(1.0, {f"m{n}": 0.0 for n in range(200)}), "200 metrics"),
    ],
)
def test_what_is_no_score_is_refused(returned, words):
    with pytest.raises(InvalidScore, match=words):
        play(lambda task, agent: returned)


def test_another_exception_is_not_scored_and_its_traceback_begins_at_the_environments_own_code():
    with pytest.raises(KeyError) as caught:
        play(lambda task, agent: {}["missing"])
    text = explain(caught.value)
    assert "test_sdk.py" in text
    assert "playing.py" not in text
    assert text.endswith("KeyError: 'missing'")


def test_what_is_held_out_is_never_trained_on():
    def draw(rng):
        return rng.randrange(500)

    trained = {Task(Split.TRAIN, n, 1).draw(draw) for n in range(2000)}
    held_out = {Task(Split.EVAL, n, 2).draw(draw) for n in range(2000)}
    assert not trained & held_out
    assert all(split_of(repr(number)) == Split.EVAL for number in held_out)


def test_rows_are_held_out_by_their_content_and_each_is_played_once_a_pass():
    rows = [{"word": f"w{number}", "difficulty": number % 3} for number in range(100)]
    played = {split: [Task(split, index, 0).row(rows)["word"] for index in range(100)] for split in Split}
    assert not {*played[Split.TRAIN]} & {*played[Split.EVAL]}
    assert sum(len({*words}) for words in played.values()) == 100
    assert len({*played[Split.TRAIN][: len({*played[Split.TRAIN]})]}) == len({*played[Split.TRAIN]})
    divided = Rows(rows[::-1])
    assert {Task(Split.EVAL, index, 9).row(divided)["word"] for index in range(100)} == {*played[Split.EVAL]}
    with pytest.raises(InvalidInput, match="none of the 1 rows is for"):
        [Task(split, 0, 0).row(["only"]) for split in Split]


class Unnamed:
    """An object whose text is its address."""


@dataclass
class Row:
    word: str
    check: object = None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"check": len, "run": lambda: 1}, r"it\['run'\] is a function"),
        ([1, {"tags": {"a", "b"}}], r"it\[1\]\['tags'\] is a set"),
        (Row("w", Unnamed()), r"it.check is a Unnamed"),
        ({Unnamed(): 1}, r"a key of it is a Unnamed"),
    ],
)
def test_content_without_a_stable_text_is_refused_unless_a_text_is_given(content, words):
    for split in Split:
        with pytest.raises(InvalidInput, match=words):
            Task(split, 0, 0).draw(lambda rng: content)
        with pytest.raises(InvalidInput, match=words):
            Task(split, 0, 0).row([content])
    task = Task(Split.TRAIN, 0, 0)
    assert task.draw(lambda rng: content, text=lambda _: f"{random.random()}") is content
    assert Task(Split.TRAIN, 0, 0).draw(lambda rng: Row(f"w{rng.random()}")).check is None


CALL = ToolCall("add", '{"a": 1}', "c1")
FUNCTION = {"name": "add", "parameters": {"type": "object"}}
TEXT = '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}'


@pytest.mark.parametrize(("given", "message"), rows(__file__, "message_forms"))
def test_messages_in_the_forms_of_other_libraries(given, message):
    calls = tuple(ToolCall(*call) for call in message.get("tool_calls", ()))
    assert message_of(given) == Message(**{**message, "tool_calls": calls})
    assert message_of({"role": "assistant", "content": None, "tool_calls": [CALL]}).tool_calls == (CALL,)
    assert message_of(Message("assistant", "", tool_calls=({"name": "add", "arguments": {"a": 1}},))).tool_calls


@pytest.mark.parametrize(
    ("given", "words"),
    [
        *rows(__file__, "messages"),
        (Message("assistant", "", tool_calls=(ToolCall("add", "1"),)), "a tool call needs"),
        (Message("user", "x", name=3), "name must be text"),
    ],
)
def test_other_messages_are_refused_with_the_reason(given, words):
    with pytest.raises(InvalidTurn, match=words):
        message_of(given)


@pytest.mark.parametrize(
    "given", [FUNCTION, {"type": "function", **FUNCTION}, {"type": "function", "function": FUNCTION}]
)
def test_a_tool_with_and_without_its_wrapper(given):
    assert tool_text(given) == TEXT


@pytest.mark.parametrize(
    "given", [{"type": "web_search"}, {"function": {}}, "add", {"name": "add", "parameters": {1, 2}}]
)
def test_other_tools_are_refused(given):
    with pytest.raises(InvalidTurn, match="tool"):
        tool_text(given)


def defined(source):
    names = vars(typing).copy()
    exec(source, names)
    return names["f"]


@pytest.mark.parametrize("source", data(__file__, "tool_functions"))
def test_a_function_is_described_as_transformers_does(source):
    function = defined(source)
    assert json.loads(tool_text(function)) == get_json_schema(function)


@pytest.mark.parametrize(("source", "words"), rows(__file__, "no_tool_functions"))
def test_a_function_that_lacks_a_description_is_refused(source, words):
    with pytest.raises(InvalidTurn, match=words):
        tool_text(defined(source))


LONG_S, SHORT_S = 60.0, 0.05


def work_forever():
    while True:
        pass


def here(code):
    """The error of the code, if it has one."""
    try:
        code()
    except BaseException as error:
        return error
    return None


def in_a_thread(code):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(here, code).result()


@pytest.fixture(params=[here, in_a_thread])
def run(request):
    return request.param


def limited(*limits_s: float, code=work_forever):
    def call():
        if not limits_s:
            return code()
        with time_limit(limits_s[0]):
            return limited(*limits_s[1:], code=code)()

    return call


@pytest.mark.parametrize("limits_s", [(SHORT_S,), (LONG_S, SHORT_S), (SHORT_S, LONG_S)])
def test_the_shortest_limit_ends_the_code(run, limits_s):
    assert repr(run(limited(*limits_s))) == f"TimeoutError('the tool took longer than {SHORT_S:g} s')"


def test_a_call_that_waits_is_too_long_and_code_within_its_limit_is_not_interrupted(run):
    assert isinstance(run(limited(SHORT_S, code=lambda: time.sleep(4 * SHORT_S))), TimeoutError)

    def code():
        with time_limit(SHORT_S), time_limit(None):
            pass
        for _ in range(100):
            time.sleep(SHORT_S / 50)

    assert run(code) is None


def test_an_error_of_the_code_and_one_that_it_handles_stay_its_own(run):
    assert isinstance(run(limited(LONG_S, code=lambda: {}["x"])), KeyError)

    def handles():
        with time_limit(SHORT_S):
            try:
                work_forever()
            except TimeoutError:
                return

    assert run(handles) is None


def test_a_limit_goes_on_after_one_within_it(run):
    def code():
        with time_limit(2 * SHORT_S):
            with time_limit(LONG_S):
                pass
            work_forever()

    assert str(run(code)) == f"the tool took longer than {2 * SHORT_S:g} s"
