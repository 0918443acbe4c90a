"""An OpenAI server of a scripted policy, and the official client connected to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openai import OpenAI

from marlaas.environment import Agents
from marlaas.envs.scripted import ScriptedReplies
from marlaas.episode_state import EpisodeState
from marlaas.openai_server import OpenAIServer

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
def opened(
    *replies: str, agents: tuple[str, ...] = ("policy",), temperature: float = 1.0, channel: Any = None
) -> Iterator[Any]:
    """A server, its client, and the requests to the agents behind it."""
    channel = channel or ScriptedReplies(replies, max_turns=99)
    state = EpisodeState(agents, channel, temperature)
    with Agents(state)[agents[0]].openai() as server, client_of(server) as client:
        yield server, client, channel.asked


def client_of(server: OpenAIServer) -> OpenAI:
    return OpenAI(base_url=server.base_url, api_key=server.api_key)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def create(client: OpenAI, *messages: Any, **more: Any) -> Any:
    return client.chat.completions.create(model=more.pop("model", "policy"), messages=list(messages), **more)
