"""Play a demonstration: each assistant's message becomes a turn whose reply is given, not sampled.

Runs in the sandbox's child process and in the checks before a start. Independent of the bus and of processes.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from marlaas.chat_messages import message_of
from marlaas.environment import Message, Task, TurnLimit
from marlaas.environment_types import TurnRequest
from marlaas.envs import DATASET, data_digest
from marlaas.envs.loading import Environment, resolve
from marlaas.envs.playing import Outcome
from marlaas.episode_state import EpisodeState
from marlaas_api.errors import InvalidInput

DemonstratedTurn = tuple[tuple[Message, ...], Message]
"""The messages before a reply, and the reply."""


class NoDemonstration(InvalidInput):
    """The environment demonstrates nothing. It would not in any play, so the job fails at once."""


def turns_of(messages: Iterable[Message | Mapping[str, Any]]) -> list[DemonstratedTurn]:
    """Return the turns of a conversation: one for each assistant's message. Messages after the last one belong to none.

    Raises:
        InvalidInput: a malformed message, no assistant's message, one without text and tool calls, or one that follows nothing.
    """
    before: list[Message] = []
    turns: list[DemonstratedTurn] = []
    for message in map(message_of, messages):
        if message.role != "assistant":
            before.append(message)
            continue
        if not before:
            raise InvalidInput(
                "an assistant's message follows no other message; a reply needs something that it answers"
            )
        if not message.content.strip() and not message.tool_calls:
            raise InvalidInput("an assistant's message is empty, so there is nothing to learn from it")
        turns.append((tuple(before), message))
        before = []
    if not turns:
        raise InvalidInput("no message is an assistant's, so there is no reply to learn from")
    return turns


def demonstration_of(environment: Environment, task: Task, agents: Sequence[str]) -> dict[str, list[DemonstratedTurn]]:
    """Return the demonstrated turns of a task by agent.

    Args:
        agents: the job's agents.

    Raises:
        NoDemonstration: the environment has no `demonstrate`.
        InvalidInput: as `turns_of`, or not messages of the job's agents.
        Other exceptions: of the environment's own code.
    """
    if environment.demonstrate is None:
        raise NoDemonstration(
            "the environment demonstrates nothing: give it a function `demonstrate(task)` that returns a list of chat messages, or choose "
            "another training.algorithm than sft"
        )
    found = environment.demonstrate(task)
    given = found if isinstance(found, Mapping) else {agents[0]: found} if len(agents) == 1 else None
    if given is None or not given or not set(given) <= set(agents):
        wanted = "a list of messages" if len(agents) == 1 else f"messages by agent ({', '.join(agents)})"
        raise InvalidInput(f"`demonstrate` returned {found!r:.80}; expected {wanted}")
    return {agent: turns_of(messages) for agent, messages in given.items()}


def with_data(environment: Environment, demonstrations: Mapping[str, Any] | None) -> Environment:
    """Return the environment with the demonstrations of a data set instead of its own.

    Args:
        demonstrations: by agent, the arguments of the environment `dataset` (`initFrom.sft.data`); None: the environment's own.

    Raises:
        InvalidInput: as the data set.
    """
    if demonstrations is None:
        return environment
    made = {agent: resolve(DATASET, args).create() for agent, args in demonstrations.items()}

    def demonstrate(task: Task) -> dict[str, Any]:
        return {agent: data.demonstrate(task) for agent, data in made.items() if data.demonstrate is not None}

    digest = data_digest([environment.data_digest, *(data.data_digest for data in made.values())])
    return replace(environment, demonstrate=demonstrate, data_digest=digest)


def play_demonstration(
    environment: Environment, task: Task, state: EpisodeState, held_out: Sequence[Task] = ()
) -> Outcome:
    """Have the turns of a task's demonstration recorded; rewards are 0. Raises as `demonstration_of`.

    held_out: tasks whose demonstrations are recorded after it, each in a branch of its own: they are measured, and not trained.
    """
    for agent, turns in demonstration_of(environment, task, tuple(state.rewards)).items():
        parent: int | None = None
        for before, reply in turns:
            try:
                parent = state.turn(TurnRequest(agent, parent, before, demonstration=reply)).turn
            except TurnLimit as error:
                text = f"the demonstration has {len(turns)} replies, and {error}: raise rollout.maxTurns"
                raise InvalidInput(text) from error
    for one in held_out:
        _record_apart(environment, one, state)
    return Outcome(dict(state.rewards), {}, "completed", 0.0)


def _record_apart(environment: Environment, task: Task, state: EpisodeState) -> None:
    """Have the turns of a held-out demonstration recorded; what cannot be demonstrated is left out, because nothing depends on it."""
    try:
        found = demonstration_of(environment, task, tuple(state.rewards))
    except Exception:
        return
    state.begin_apart()
    for agent, turns in found.items():
        parent: int | None = None
        with contextlib.suppress(TurnLimit):
            for before, reply in turns:
                parent = state.turn(TurnRequest(agent, parent, before, demonstration=reply)).turn
