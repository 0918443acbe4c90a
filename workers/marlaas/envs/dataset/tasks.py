"""The tasks of a data set: its rows, divided into training and held-out ones by a hash of the prompt or by their files.

Invariant: no row, and no text of a prompt, is in both parts.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from marlaas.environment import Split
from marlaas.envs.dataset.fields import Fields, Rendered, flaw_of
from marlaas.envs.dataset.index import IndexedFile, prompt_digest
from marlaas.envs.dataset.problems import MAX_TOLD, InvalidRows, RowProblem
from marlaas_api.errors import InvalidInput

_HELD_OUT_BYTE = 8
"""One text in eight is held out, as `marlaas_api.names.split_of` divides all content."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One row as a task. place: file and line."""

    place: str
    row: dict[str, Any]
    rendered: Rendered


class Rows:
    """Rows of several files, numbered through."""

    def __init__(self, files: Sequence[IndexedFile], fields: Fields) -> None:
        self.files = tuple(files)
        self._fields = fields
        self._ends = list(accumulate(len(one.digests) for one in files))

    def __len__(self) -> int:
        return self._ends[-1]

    def digests(self) -> "np.ndarray[Any, Any]":
        """Return the digests of all prompts."""
        return np.concatenate([one.digests for one in self.files])

    def lengths(self) -> "np.ndarray[Any, Any]":
        """Return the lengths of all prompts in characters."""
        return np.concatenate([one.lengths for one in self.files])

    def flawed(self) -> "np.ndarray[Any, Any]":
        """Return the numbers of the rows whose conversation cannot be demonstrated."""
        starts = (0, *self._ends[:-1])
        return np.concatenate([one.flawed.astype(np.int64) + at for one, at in zip(self.files, starts, strict=True)])

    def place(self, number: int) -> str:
        """Return file and line of a row."""
        file, within = self._at(number)
        return file.place(within)

    def task(self, number: int) -> TaskRow:
        """Return a row with its prompt. Raises InvalidInput if its file has changed since it was indexed."""
        file, within = self._at(number)
        try:
            row = file.rows.row(within)
            rendered = self._fields.render(row)
        except (OSError, RowProblem) as problem:
            raise InvalidInput(f"{file.place(within)}: {problem}; the file has changed since the start") from problem
        if int.from_bytes(prompt_digest(rendered.text), "big") != int(file.digests[within]):
            raise InvalidInput(f"{file.place(within)}: the file has changed since the start")
        return TaskRow(file.place(within), row, rendered)

    def _at(self, number: int) -> tuple[IndexedFile, int]:
        at = bisect_right(self._ends, number)
        return self.files[at], number - (self._ends[at - 1] if at else 0)


@dataclass(frozen=True, slots=True)
class Part:
    """The tasks of a split: the row of task i is `numbers[i]`."""

    rows: Rows
    numbers: "np.ndarray[Any, Any]"

    def __len__(self) -> int:
        return len(self.numbers)

    def task(self, index: int) -> TaskRow:
        """Return the row of a task; tasks go through the rows in order, and begin again after the last one. Raises InvalidInput: no row."""
        if not len(self):
            raise InvalidInput("held_out: all rows are held out, so none can be trained; lower share")
        return self.rows.task(int(self.numbers[index % len(self)]))

    def require_demonstrations(self) -> None:
        """Raise InvalidRows if the conversations of some rows cannot be demonstrated."""
        flawed = np.intersect1d(self.rows.flawed(), self.numbers)
        found = [self.rows.task(int(number)) for number in flawed[:MAX_TOLD]]
        if found:
            raise InvalidRows([f"{one.place}: {flaw_of(one.rendered.conversation)}" for one in found], len(flawed))

    def num_repeated(self) -> int:
        """Return the number of rows whose prompt stands in an earlier row of this part."""
        ordered = np.sort(self.rows.digests()[self.numbers])
        return int(np.count_nonzero(ordered[1:] == ordered[:-1]))


@dataclass(frozen=True, slots=True)
class Tasks:
    """Both parts. num_dropped: training rows that are left out, because their prompt is held out."""

    train: Part
    held_out: Part
    num_dropped: int = 0

    def part(self, split: Split) -> Part:
        """Return the part of a split."""
        return self.train if split is Split.TRAIN else self.held_out

    def files(self) -> tuple[IndexedFile, ...]:
        """Return all files, each once."""
        return tuple(dict.fromkeys((*self.train.rows.files, *self.held_out.rows.files)))


def divided(rows: Rows, share: float | None) -> Tasks:
    """Divide rows by the hash of their prompt. share: held out; None: one in eight; 1: all. Raises InvalidInput: a part is empty."""
    digests = rows.digests()
    if share is None:
        is_held_out = (digests >> np.uint64(56)) % _HELD_OUT_BYTE == 0
    elif share == 1:
        return Tasks(Part(rows, np.empty(0, np.uint32)), Part(rows, np.arange(len(rows), dtype=np.uint32)))
    else:
        is_held_out = digests < np.uint64(int(share * 2**64))
    train, held_out = np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
    for name, numbers in (("training", train), ("held-out", held_out)):
        if not len(numbers):
            raise InvalidInput(
                f"none of the {len(rows)} rows is a {name} row; rows are divided by a hash of their prompt: add rows, or set held_out"
            )
    return Tasks(Part(rows, _small(train)), Part(rows, _small(held_out)))


def separate(rows: Rows, held_out: Rows) -> Tasks:
    """Return the tasks of two sources; training rows whose prompt is held out are left out. Raises InvalidInput: all are."""
    is_held_out = np.isin(rows.digests(), held_out.digests())
    train = np.flatnonzero(~is_held_out)
    if not len(train):
        raise InvalidInput(
            f"the prompts of all {len(rows)} training rows are held out too: name other files in held_out"
        )
    dropped = int(is_held_out.sum())
    return Tasks(Part(rows, _small(train)), Part(held_out, np.arange(len(held_out), dtype=np.uint32)), dropped)


def _small(numbers: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    return numbers.astype(np.uint32)
