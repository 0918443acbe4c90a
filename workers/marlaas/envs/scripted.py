"""Scripted replies, to try an environment without a model: in its author's tests, and in `marlaas env play --reply`.

state = EpisodeState(["policy"], ScriptedReplies(["dcba"]))
play_episode(resolve("reverse", {}).create(), Task(Split.TRAIN, 0, 0), state)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from marlaas.environment import Reply, StopReason, TurnLimit
from marlaas.environment_types import TurnRequest
from marlaas.models.families import THINK, THINK_END
from marlaas.tool_calls import chatml_parts, tool_names


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One turn: its request and its reply."""

    request: TurnRequest
    reply: Reply


class WrittenReplies:
    """Makes replies of texts that a person or a script has written, as a ChatML model would write them.

    It knows the tools of each conversation, because a request without tools has those of the turn before.
    """

    def __init__(self) -> None:
        self._tools: dict[tuple[str, int], frozenset[str]] = {}

    def reply(self, request: TurnRequest, text: str) -> Reply:
        """Return the reply of a text to a request."""
        if request.tools is not None:
            names = tool_names(request.tools)
        else:
            names = self._tools.get((request.agent, -1 if request.parent is None else request.parent), frozenset())
        self._tools[request.agent, request.number] = names
        ends = [text.find(one) + len(one) for one in request.stop if one in text]
        text, reason = text[: min(ends, default=len(text))], StopReason.MATCH if ends else StopReason.STOP
        opened = THINK if THINK in request.opening and THINK_END not in request.opening else ""
        parts = replace(chatml_parts(opened + text, names), raw=text)
        return Reply(text, reason, len(text), request.number, opening=request.opening, parts=parts)


class RecordedReplies:
    """Channel that computes each reply from the request and records the turns in `asked`. Raises TurnLimit like a sandbox."""

    def __init__(self, answer: Callable[[TurnRequest], str], max_turns: int = 8) -> None:
        self.asked: list[RecordedTurn] = []
        self.may_speak: tuple[str, ...] = ()
        self.num_tools = 0
        self._answer = answer
        self._written = WrittenReplies()
        self._max_turns = max_turns

    def turn(self, request: TurnRequest) -> Reply:
        """Return and record a reply. Raises TurnLimit."""
        if request.num_before >= self._max_turns:
            raise TurnLimit(f"agent {request.agent!r} has used all of its {self._max_turns} turns")
        text = self._answer(request)
        reply = self._written.reply(request, text)
        self.asked.append(RecordedTurn(request, reply))
        return reply

    def may_call(self, agents: Sequence[str]) -> None:
        """Record the agents that the task may call."""
        self.may_speak = tuple(agents)

    def tool(self, is_open: bool, rewards: Mapping[str, float]) -> None:
        """Count tool calls."""
        self.num_tools += is_open


class ScriptedReplies(RecordedReplies):
    """Channel that replies from a list, in order. Raises TurnLimit after the last reply."""

    def __init__(self, replies: Iterable[str], max_turns: int = 8) -> None:
        texts = list(replies)
        super().__init__(lambda _: texts[len(self.asked)], min(max_turns, len(texts)))
