"""Values of the environment SDK: messages, replies, scores, tasks, and the channel to the policies (`marlaas.environment`)."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar, overload

from marlaas.stable_text import stable_text
from marlaas_api.errors import InvalidInput
from marlaas_api.names import Split, StopReason, derive_seed, split_of

_T = TypeVar("_T")
_R = TypeVar("_R")
_ROLES = ("system", "user", "assistant", "tool")
_MAX_DRAWS = 1000


class TurnLimit(Exception):
    """The agent has used all turns that the job allows (`rollout.maxTurns`). If `play` lets it pass, the episode ends and is scored."""


class ToolError(Exception):
    """A tool failed because of the policy's input. If `play` does not catch it, the episode ends and is scored."""


class ServiceFailed(Exception):
    """A service that the environment needs has failed, such as a judge. The episode is a fault of the infrastructure and is played again."""


class InvalidTurn(InvalidInput, ValueError):
    """The environment asks for a turn that no policy could take. It is a fault of the environment, also within a tool call."""


class UnknownAgent(InvalidInput):
    """The environment names an agent that the job lacks. It would do so in every play, so the job fails at once."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call, in a reply or in a hand-written assistant message. `arguments` is the JSON text of an object."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """Chat message of role system, user, assistant or tool.

    name: of a tool. tool_call_id: the call that a tool message answers. reasoning: of an assistant; the chat template shows it or
    leaves it out.
    """

    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str = ""

    def __post_init__(self) -> None:
        if self.role not in _ROLES:
            raise InvalidTurn(f"a message's role is one of {', '.join(_ROLES)}, not {self.role!r}")
        if not isinstance(self.content, str):
            raise InvalidTurn(f"a message's content is text, not {type(self.content).__name__}")


@dataclass(frozen=True, slots=True)
class ReplyParts:
    """A reply as its model family reads it: see the properties of `Reply`."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    raw: str


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of an agent. Pass it to `Agent.fork` to branch after it.

    Attributes:
        text: all that the policy wrote, without the end token. Special tokens are written out if the model family structures
            its replies with them (Llama's `<|python_tag|>`, gpt-oss' channels), and left out otherwise.
        num_prompt_tokens: length of the prompt.
        opening: the beginning of the assistant's message, which the chat template (`<think>` and a line end) or the environment (an
            assistant's message at the end of `Agent.ask`) has written into the prompt. It is not trained. `text` follows it.
        parts: the reply as its model family reads it; None for a plain text.
    """

    text: str
    stop_reason: StopReason = StopReason.STOP
    num_tokens: int = 0
    turn: int = 0
    num_prompt_tokens: int = 0
    opening: str = ""
    parts: ReplyParts | None = None

    @property
    def reasoning(self) -> str:
        """The reasoning before the answer, without its marks; empty if there is none."""
        return "" if self.parts is None else self.parts.reasoning

    @property
    def content(self) -> str:
        """The answer, without reasoning and tool calls. A malformed tool call is part of it."""
        return self.text if self.parts is None else self.parts.content

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls; they have no ids."""
        return () if self.parts is None else self.parts.tool_calls

    @property
    def raw(self) -> str:
        """The text with every special token written out, without the end token."""
        return self.text if self.parts is None else self.parts.raw

    @property
    def message(self) -> str:
        """The whole message of the assistant: opening and text."""
        return self.opening + self.text


@dataclass(frozen=True, slots=True)
class Score:
    """Result of an episode: a reward for all agents or by agent name, and metrics to record. Values are between -1e30 and 1e30.

    A reward that is None leaves the episode unscored. A metric that is None or NaN does not apply to the episode, and is left out.
    answer: what the policy has answered, by whose text a suite with several samples finds the most frequent answer; None: none.
    data: values of JSON for the environment's `score_group`, at most 64 Ki characters.
    """

    reward: float | Mapping[str, float] | None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    answer: str | None = None
    data: Any = None


@dataclass(frozen=True, slots=True)
class Play:
    """An episode of a group, as the environment's `score_group` gets it.

    Attributes:
        rewards: what `play` gave, by agent, with the rewards of turns.
        metrics: of the episode.
        data: what `Score.data` was; None if it was not set.
    """

    rewards: Mapping[str, float]
    metrics: Mapping[str, float]
    data: Any = None


class Rows(Sequence[_R]):
    """Rows of a data set, divided by their content: one in eight is held out, whatever the order of the rows and the seed.

    Equal rows are in the same part. `Task.row` takes plain sequences too; of many thousand rows, make this once, when the
    module is loaded.

    Args:
        rows: the data set.
        text: returns the text that identifies a row; by default its `repr`.

    Raises:
        InvalidInput: no text identifies a row in every process.
    """

    def __init__(self, rows: Sequence[_R], text: Callable[[_R], str] = stable_text) -> None:
        self._rows = rows
        parts: dict[Split, list[int]] = {Split.TRAIN: [], Split.EVAL: []}
        for number, row in enumerate(rows):
            parts[split_of(text(row))].append(number)
        self._parts, self.text = parts, text

    @overload
    def __getitem__(self, at: int) -> _R: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[_R]: ...
    def __getitem__(self, at: int | slice) -> _R | Sequence[_R]:
        return self._rows[at]

    def __len__(self) -> int:
        return len(self._rows)

    def part(self, split: Split) -> Sequence[int]:
        """Return the numbers of the rows of a split. Raises InvalidInput if it has none."""
        if not self._parts[split]:
            raise InvalidInput(
                f"none of the {len(self)} rows is for {split}: one in eight is held out, by its content; add rows"
            )
        return self._parts[split]


@dataclass(frozen=True)
class Task:
    """The prompt instance to play. All episodes of a group get the same task and must draw the same content from it.

    Attributes:
        split: `train`, or `eval` for held-out tasks.
        index: number of the task within its split; both splits count from 0, so `DATA[task.index]` would train on held-out rows.
        drawn: the texts of the content that `draw` and `row` have given, by which tasks are compared.
    """

    split: Split
    index: int
    seed: int
    drawn: list[str] = field(default_factory=list, compare=False, repr=False)

    @cached_property
    def rng(self) -> random.Random:
        """Random generator that depends only on the task. An environment must use no other randomness.

        It does not separate the splits: use `draw` or `row` for content that an evaluation must not have in common with training.
        """
        return random.Random(derive_seed(self.seed, self.split, self.index))

    def draw(self, generate: Callable[[random.Random], _T], text: Callable[[_T], str] = stable_text) -> _T:
        """Generate content that belongs to this split, so that held-out content is never trained on, whatever the seeds.

        A hash of the content's text assigns it to a split; one in eight is held out. `generate` is called until its
        content falls into this split.

        Args:
            generate: returns content, from the generator that it is given.
            text: returns the text that identifies the content; by default its `repr`.

        Raises:
            InvalidInput: no content of this split in 1000 draws, or no text identifies the content in every process.
        """
        for _ in range(_MAX_DRAWS):
            content = generate(self.rng)
            if split_of(found := text(content)) == self.split:
                self.drawn.append(found)
                return content
        raise InvalidInput(f"no {self.split} task in {_MAX_DRAWS} draws: the environment has too few different tasks")

    def row(self, rows: Sequence[_R], text: Callable[[_R], str] = stable_text) -> _R:
        """Return the task's row of a data set. No held-out row is ever trained on.

        Tasks of a split go through its rows in order, and begin again after the last one. `training.data` sets the order of tasks.

        Args:
            rows: the data set; `Rows`, or a plain sequence.
            text: returns the text that identifies a row; by default its `repr`. `Rows` have their own.

        Raises:
            InvalidInput: as `Rows`.
        """
        divided = rows if isinstance(rows, Rows) else Rows(rows, text)
        part = divided.part(self.split)
        row = divided[part[self.index % len(part)]]
        self.drawn.append(divided.text(row))
        return row


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Request for one turn of an agent: messages or raw text, appended after turn `parent` (None: a new conversation).

    `tools` holds the JSON text of each function that the chat template shows. None keeps those of the turn before. The
    episode sets `number`, that of the turn among the agent's own (`names.turn_number`), and `num_before`, the turns that the agent
    has had on the way to this one. `choice`: the number of the choice (`Agent.branch`) of which the reply is a candidate. `stop`: strings that end the reply.
    `demonstration`: the reply itself; then none is sampled.
    """

    agent: str
    parent: int | None
    append: tuple[Message, ...] | str
    max_tokens: int | None = None
    tools: tuple[str, ...] | None = None
    number: int = 0
    num_before: int = 0
    choice: int | None = None
    stop: tuple[str, ...] = ()
    demonstration: Message | None = None

    @property
    def opening(self) -> str:
        """The text of an assistant's message at the end, which the reply continues; empty if another message is the last one."""
        last = self.append[-1] if self.append and not isinstance(self.append, str) else None
        return last.content if last is not None and last.role == "assistant" else ""


class Channel(Protocol):
    """Source of an agent's replies: the sandbox's supervisor, a person, or a script (`marlaas.envs.scripted`)."""

    def turn(self, request: TurnRequest) -> Reply:
        """Generate a reply. Raises TurnLimit."""
        ...

    def may_call(self, agents: Sequence[str]) -> None:
        """Record the agents that the task may call, before the first turn, if they are not all."""
        ...

    def tool(self, is_open: bool, rewards: Mapping[str, float]) -> None:
        """Record that a tool call begins or ends, with each agent's reward so far."""
        ...
