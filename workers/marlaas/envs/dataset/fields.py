"""Templates of a data set: the prompt, the truth and the tests of a program, rendered from the columns of a row."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marlaas.chat_messages import read_message
from marlaas.environment_types import InvalidTurn, Message
from marlaas.envs.dataset.problems import RowProblem
from marlaas.envs.dataset.settings import Settings
from marlaas.envs.dataset.templates import ROW, Row, Template
from marlaas.envs.demonstrations import turns_of
from marlaas.envs.loading import nearest
from marlaas_api.errors import InvalidInput

_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Rendered:
    """Prompt, truth and tests of one row. conversation: the prompt and what is demonstrated; empty if nothing is."""

    prompt: tuple[Message, ...]
    truth: str
    tests: str
    conversation: tuple[Message, ...] = ()

    @property
    def text(self) -> str:
        """The text by which prompts are compared and divided into training and held-out tasks."""
        return joined((one.role, one.content) for one in self.prompt)


def joined(prompt: Iterable[tuple[str, str]]) -> str:
    """Return the text of messages."""
    return "\n\n".join(f"{role}: {content}" for role, content in prompt)


def flaw_of(conversation: Sequence[Message]) -> str:
    """Return why a conversation cannot be demonstrated; empty if it can."""
    try:
        turns_of(conversation)
    except InvalidInput as error:
        return str(error)
    return ""


class Fields:
    """The templates of a data set.

    columns: the columns that they read; None: all.

    Raises:
        InvalidArgument: Jinja cannot parse a template.
    """

    def __init__(self, settings: Settings) -> None:
        self._column = settings.messages
        self._prompt = [
            (one.role, Template(one.content, f"prompt[{at}].content", "prompt", at, "content"))
            for at, one in enumerate(settings.prompt)
        ]
        self._truth = Template(settings.truth, "truth", "truth") if settings.truth else None
        completion = settings.completion
        self._completion = Template(completion, "completion", "completion") if completion else None
        tests = [(at, one.code) for at, one in enumerate(settings.rewards) if one.code is not None]
        self._tests = [Template(code.tests, "tests", "rewards", at, "code", "tests") for at, code in tests]
        judges = [Template(one.judge.prompt, "judge.prompt") for one in settings.rewards if one.judge is not None]
        templates = [template for _, template in self._prompt] + [*filter(None, [self._truth, self._completion])]
        templates += self._tests
        read = frozenset().union(*(one.columns for one in templates), {self._column} if self._column else ())
        judged = frozenset().union(*(one.columns for one in judges)) - {"reply", "truth"}
        self._judged, read = judged - {ROW}, read | judged
        self.columns = None if ROW in read else read
        written = [
            [[one.role, one.content] for one in settings.prompt],
            settings.messages,
            settings.truth,
            [code.tests for _, code in tests],
            *sorted(self._judged),
        ]
        self.key = json.dumps([*written, completion] if completion else written)
        """Identifies the templates: equal rows with an equal key are rendered equally."""

    def render(self, row: Row) -> Rendered:
        """Render a row. Raises RowProblem."""
        conversation: tuple[Message, ...] = ()
        if self._column is not None:
            conversation = tuple(_messages(self._column, row))
            prompt = _before_last_reply(conversation)
        else:
            prompt = tuple(Message(role, template.render(row)) for role, template in self._prompt)
        if missing := [name for name in sorted(self._judged) if row.get(name) is None]:
            raise RowProblem(
                f"judge.prompt: the row has no column {missing[0]!r}, or it is null{nearest(missing[0], row)}"
            )
        if not any(one.content.strip() for one in prompt):
            raise RowProblem("the prompt is empty")
        if self._completion is not None:
            conversation = (*prompt, Message("assistant", self._completion.render(row)))
            if not conversation[-1].content.strip():
                raise RowProblem("completion is empty")
        tests = self._text(self._tests[0] if self._tests else None, row)
        return Rendered(prompt, self._text(self._truth, row), tests, conversation)

    def texts(self, columns: Mapping[str, Sequence[Any]], num: int) -> list[str] | None:
        """Return the texts of many rows' prompts at once, if all of these rows can be used; None: `render` each.

        columns: the values of `num` rows, by column.
        """
        if self._column is not None or any(None in columns.get(name, (None,)) for name in self._judged):
            return None
        given = (*filter(None, [self._truth, self._completion]), *self._tests)
        checked = [template.render_all(columns, num) for template in given]
        contents = [template.render_all(columns, num) for _, template in self._prompt]
        if not all(one is not None and all(map(str.strip, one)) for one in (*checked, *contents)):
            return None
        if len(contents) == 1:
            begin = f"{self._prompt[0][0]}: "
            return [begin + content for content in contents[0] or ()]
        roles = [role for role, _ in self._prompt]
        return [joined(zip(roles, row, strict=True)) for row in zip(*contents, strict=True)]

    @staticmethod
    def _text(template: Template | None, row: Row) -> str:
        if template is None:
            return ""
        text = template.render(row).strip()
        if not text:
            raise RowProblem(f"{template.field} is empty")
        return text


def _before_last_reply(conversation: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages before the assistant's messages at the end."""
    length = len(conversation)
    while length and conversation[length - 1].role == "assistant":
        length -= 1
    return tuple(conversation[:length])


def _messages(column: str, row: Row) -> Sequence[Message]:
    """Return the messages of a column: a list of {role, content}, or such a list as JSON text. Raises RowProblem."""
    if column not in row:
        raise RowProblem(f"messages: the row has no column {column!r}; it has {', '.join(map(str, row)) or 'none'}")
    given: Any = row[column]
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise RowProblem(f"messages: column {column!r} is not JSON: {error}") from None
    if not isinstance(given, list) or not given:
        raise RowProblem(f"messages: column {column!r} is {given!r:.60}; expected a list of messages")
    return [_message(column, one) for one in given]


def _message(column: str, given: object) -> Message:
    try:
        if isinstance(given, Mapping) and given.get("role") in _ROLES:
            return read_message(given, f"messages: column {column!r}")
    except InvalidTurn as error:
        raise RowProblem(str(error)) from None
    raise RowProblem(
        f"messages: column {column!r} has {given!r:.60}; expected {{role, content}} with role {', '.join(_ROLES)}"
    )
