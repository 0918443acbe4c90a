"""Plays short episodes before the first fork, so that children find the interpreter's caches filled.

CPython specializes code in its first runs, and fills its caches of attributes. Otherwise every child does so again, and copies
each page that it writes to. The environment and the supervisor's messages are this module's own; no other code runs.
"""

import random
import socket

from marlaas.environment import Agent, Message, Score, Task
from marlaas.envs.loading import Environment
from marlaas_worker.sandbox import child
from marlaas_worker.sandbox.channel import encode_frame

NUM_EPISODES = 16
"""CPython 3.11 specializes a function after 8 calls. More episodes do not reduce the page faults of a child further."""
_AGENT, _NUM_TURNS = "policy", 2


def rehearse() -> None:
    """Play the episodes in this process. The generator of random numbers is afterwards seeded anew."""
    environment = Environment(_play, takes_all_agents=False)
    for index in range(NUM_EPISODES):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(b"".join(map(encode_frame, _frames(index))))
            result = child.played(environment, theirs)
            assert result["kind"] == "score", result
            theirs.sendall(encode_frame(result))
    random.seed()


def _frames(index: int) -> list[dict[str, object]]:
    """Return all that a supervisor would send in an episode."""
    start = {"split": "train", "index": index, "seed": 0, "agents": [_AGENT], "temperature": 1.0, "is_strict": False}
    reply = {
        "kind": "reply",
        "agent": _AGENT,
        "text": "2",
        "opening": "",
        "stop_reason": "stop",
        "num_tokens": 1,
        "num_prompt_tokens": 1,
    }
    return [start, *({**reply, "turn": number} for number in range(_NUM_TURNS))]


def _play(task: Task, agent: Agent) -> Score:
    reply = agent.say("1 + 1")
    with agent.tool():
        result = reply.text
    reply = agent.ask(Message("tool", result))
    return Score(float(reply.text == "2"))
