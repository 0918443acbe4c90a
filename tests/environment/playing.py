"""Playing without a model: a function or an order of turns is the policy, also behind an OpenAI server with the official client."""

import json
import threading
from contextlib import contextmanager
from http import HTTPStatus
from inspect import iscoroutinefunction
from typing import Any

from openai import OpenAI
from tests.http_server import served
from tests.tables import data

from marlaas.environment import Agents, Split, Task, TurnLimit
from marlaas.environment_types import Reply, TurnRequest
from marlaas.envs.loading import Environment, resolve
from marlaas.envs.playing import play_episode
from marlaas.envs.scripted import RecordedReplies, ScriptedReplies
from marlaas.episode_state import EpisodeState
from marlaas_api.names import BRANCH_TURNS


@contextmanager
def chat_completions(answers):
    """A service that gives these answers (status, text; None: no message), its URL, and what it is asked."""
    left, asked = iter(answers), []

    def answer(request, body):
        asked.append({**json.loads(body), "key": request.headers["Authorization"]})
        status, text = next(left)
        message = {"choices": text and [{"message": {"content": text}}], "usage": {"total_tokens": 12}}
        return status, json.dumps(message).encode() if status == HTTPStatus.OK else text.encode()

    with served(answer) as url:
        yield f"{url}/v1", asked


def first_task(split=Split.TRAIN):
    """A new one for every play: a task's random numbers are used up by it."""
    return Task(split, 0, 7)


def said(request):
    return request.append[-1].content


def play(name, args, answer, task=None, max_turns=100):
    channel = RecordedReplies(answer, max_turns)
    state = EpisodeState(["policy"], channel)
    return play_episode(resolve(name, args).create(), task or first_task(), state), channel


def played(code, channel=None, *, is_strict=True):
    state = EpisodeState(["a", "b"], channel or OrderedReplies(), is_strict=is_strict)
    return play_episode(Environment(code, True, is_async=iscoroutinefunction(code)), first_task(), state)


def play_moves(name, args, agents, replies, task):
    """Play a game with these replies, each in a conversation of its own; return also each turn's agent and message."""
    left, told = iter(replies), []

    def answer(request):
        assert request.parent is None, "each turn is a conversation of its own"
        (message,) = request.append
        told.append((request.agent, message.content))
        return next(left)

    outcome = play_episode(resolve(name, args).create(), task, EpisodeState(agents, RecordedReplies(answer, 5)))
    assert list(left) == [], "the game ended before the last reply"
    return outcome, told


FIRST, SECOND, AFTER = BRANCH_TURNS, 2 * BRANCH_TURNS, 3 * BRANCH_TURNS
"""Numbers of the first turns in the parts of a block of two, and after it."""


ORDERS = [
    [("a", FIRST), ("a", FIRST + 1), ("b", SECOND), ("b", SECOND + 1)],
    [("b", SECOND), ("b", SECOND + 1), ("a", FIRST), ("a", FIRST + 1)],
    [("b", SECOND), ("a", FIRST), ("b", SECOND + 1), ("a", FIRST + 1)],
]
"""In which the turns of a block of two parts may be answered."""


class OrderedReplies:
    """A channel that answers some turns in a fixed order, and all others at once. order: (agent, number) of these turns."""

    def __init__(self, *order: tuple[str, int], max_turns=9):
        self.requests: list[TurnRequest] = []
        self._order, self._max_turns = list(order), max_turns
        self._changed = threading.Condition()

    def turn(self, request):
        name = (request.agent, request.number)
        with self._changed:
            assert self._changed.wait_for(lambda: name not in self._order or self._order[0] == name, timeout=30)
            if name in self._order:
                self._order.remove(name)
            self._changed.notify_all()
            if request.num_before >= self._max_turns:
                raise TurnLimit(f"{request.agent} {request.number}")
            self.requests.append(request)
        return Reply(f"{request.agent}{request.number}", num_tokens=1, turn=request.number)

    def may_call(self, agents):
        pass

    def tool(self, is_open, rewards):
        pass

    def numbers(self):
        found: dict[str, list[tuple[int, int | None]]] = {}
        for request in self.requests:
            found.setdefault(request.agent, []).append((request.number, request.parent))
        return {agent: sorted(turns) for agent, turns in sorted(found.items())}


class Meeting(OrderedReplies):
    """Answers turns when `num` of them are open, and then the next `num`."""

    def __init__(self, num):
        super().__init__()
        self._meeting = threading.Barrier(num, timeout=30)

    def turn(self, request):
        self._meeting.wait()
        return super().turn(request)


class Held(OrderedReplies):
    """Answers no turn before `may_answer` is set; `asked` is released by each."""

    def __init__(self, max_turns=9):
        super().__init__(max_turns=max_turns)
        self.asked, self.may_answer = threading.Semaphore(0), threading.Event()

    def turn(self, request):
        self.asked.release()
        assert self.may_answer.wait(30)
        return super().turn(request)


def agents_of(channel, *names: str, is_strict=True):
    return Agents(EpisodeState(names or ("a", "b"), channel, is_strict=is_strict))


ADD = data(__file__, "tool")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@contextmanager
def opened(*replies: str, agents=("policy",), temperature=1.0, channel=None):
    """A server, its client, and the requests to the agents behind it."""
    channel = channel or ScriptedReplies(replies, max_turns=99)
    state = EpisodeState(agents, channel, temperature)
    with Agents(state)[agents[0]].openai() as server, client_of(server) as client:
        yield server, client, channel.asked


def client_of(server):
    return OpenAI(base_url=server.base_url, api_key=server.api_key)


def user(text):
    return {"role": "user", "content": text}


def create(client, *messages: Any, **more: Any):
    return client.chat.completions.create(model=more.pop("model", "policy"), messages=list(messages), **more)
