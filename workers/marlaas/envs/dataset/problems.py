"""Errors of a data set: of an argument, with its place, and of rows, with file and line."""

from collections.abc import Sequence

from marlaas.environment_types import ServiceFailed
from marlaas_api.errors import InvalidInput

MAX_TOLD = 5
"""Rows that an error names; the others are counted."""


class InvalidArgument(InvalidInput):
    """An argument of the environment is not valid.

    loc: its keys and list positions below `args`. problems: the text without that place, which a manifest's finding has.
    """

    def __init__(self, text: str, *loc: str | int) -> None:
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
        super().__init__(f"{place}: {text}" if place else text)
        self.loc, self.problems = loc, [text]


class SourceUnavailable(InvalidArgument, ServiceFailed):
    """The service that holds the rows refuses. A check reports it; in a sandbox, it is a fault of the infrastructure."""


class SourceSilent(SourceUnavailable):
    """The service that holds the rows does not answer, or has an error of its own. A check reports it; a sandbox waits for it."""


class RowProblem(Exception):
    """A row cannot be used; the text says why, without the row's place."""


class InvalidRows(InvalidInput):
    """Rows of a file cannot be used.

    Args:
        found: the first problems, each with file and line.
        num: of all problems.

    Attributes:
        loc: the source's place below `args`, once it is known.
    """

    loc: tuple[str | int, ...] = ()

    def __init__(self, found: Sequence[str], num: int) -> None:
        self.problems = [*found, *([f"and {num - len(found)} more rows with problems"] if num > len(found) else [])]
        super().__init__("\n".join(self.problems))
